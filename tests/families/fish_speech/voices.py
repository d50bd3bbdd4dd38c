"""Voices of random codes, in the memory of a slow AR in this process."""

import hashlib
from types import SimpleNamespace

import numpy as np
import torch

from tests.families.runner import as_the_runner_says, forced, merge, remember
from tests.in_process_workers import SECRET
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.prompt import PromptBuilder
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.speaker.wire import DescribeCall
from vllm_tts_cache.store.encoding import EncodingKey

TEXT = "The keeper counts the ships, and then counts them again."
REF_TEXT = "What is said in the reference."


def random_codes(num_frames=70, seed=0):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1_024, (num_frames, 10), dtype=np.int16)
    codes[:, 0] = random.integers(0, 4_096, num_frames)
    return codes


class Voice:
    """Codes in the worker's cache, and what the API process sends to speak by them."""

    def __init__(self, slow_ar, codes, text=TEXT, ref_text=REF_TEXT):
        self.codes = codes
        self.text, self.ref_text = text, ref_text
        self.speakers = slow_ar.tts_cache_speakers
        audio_sha256 = hashlib.sha256(codes.tobytes()).hexdigest()
        ref = SpeakerRef(audio_sha256=audio_sha256, segment=Segment.REGISTERED)
        self.ref = ref.signed(SECRET, "")
        self.speakers.describe(DescribeCall(SECRET), 0)
        self.key = EncodingKey(
            audio_sha256=audio_sha256,
            encoder_fingerprint=self.speakers.fingerprints[CODEC],
        )
        self.remember(codec={"codes": codes})
        builder = PromptBuilder(
            tokenizer=slow_ar._get_tokenizer(),
            first_semantic_id=slow_ar._semantic_begin_id,
        )
        voice = builder.voice(ref_text, self.key, codes)
        prompt = builder.speak(voice, text, self.ref)
        self.ids = torch.tensor(prompt["prompt_token_ids"], dtype=torch.int32)
        self.where, self.info = voice.reference, prompt["additional_information"]

    def remember(self, *, codec):
        remember(self.speakers, self.ref, codec=codec)


class Bench:
    """In the shared tests of references' rows."""

    def __init__(self, talker, _checkpoint):
        self.talker = talker
        self.takes_room = (talker.codebook_embeddings, "forward")

    def voice(self, number=0, spoken=REF_TEXT):
        """Their semantic codes are the same, so that their ids are."""
        codes = random_codes(seed=number)
        codes[:, 0] = random_codes()[:, 0]
        return Voice(self.talker, codes, ref_text=spoken)

    @torch.inference_mode()
    def rows(self, requests):
        made = []
        for name, voice, begin, end, info in requests:
            span = voice.ids[begin:end]
            said = as_the_runner_says(name, begin, len(voice.ids))
            out, rows, update = self.talker.preprocess(span, None, **info, **said)
            codes = update["codes"]["audio"]
            assert torch.equal(out, span) and codes.shape == (len(span), 10)
            assert (codes.device.type, codes.dtype) == ("cpu", torch.long)
            assert not codes.any()
            made.append(rows)
        return made

    def hosts(self, voice):
        """By its own route for a voice that it knows already: its speaker cache."""
        cache, name = self.talker._speaker_cache, voice.ref.audio_sha256
        key = cache.make_cache_key(name, model_type="fish_speech", created_at=1)
        cache.put(key, {"ref_codes_fq": torch.tensor(voice.codes).long()})
        told = {"text": voice.text, "ref_text": voice.ref_text}
        build = self.talker._build_structured_voice_clone_prefill_embeds
        return (build({**told, "voice_name": name, "voice_created_at": 1}),)

    def plain(self):
        ids = torch.tensor(self.talker._get_tokenizer().encode(TEXT), dtype=torch.int32)
        given = SimpleNamespace(ids=ids, info={})
        return given, self.talker._build_prefill_embeds(ids, {})

    def ended(self, *names):
        """Whose next id is the one that ends them."""
        return forced(self.talker, FAMILY.failure_id, 256, names)


def computed_once(forward):
    """The host's fast AR, most of a step's time: tests give it the same steps again."""
    known = {}

    def frame(*, generator, **given):
        said = [v.tolist() if torch.is_tensor(v) else v for v in given.values()]
        key = repr(said), generator.get_state().numpy().tobytes()
        if key not in known:
            known[key] = forward(generator=generator, **given), generator.get_state()
        codes, state = known[key]
        generator.set_state(state)
        return codes.clone()

    return frame


class Speech:
    """Of a slow AR, in the shared tests of preemption."""

    processor = "slow_ar_to_dac_decoder_async_chunk"
    num_blocks = 20  # one of them is the null block
    # So many frames of each have the same first code, as silence has.
    num_silent = 40

    def __init__(self, talker, _checkpoint):
        self.talker = talker
        talker.fast_ar.forward = computed_once(talker.fast_ar.forward)
        self.connector = {
            "codec_chunk_frames": 5,
            "codec_left_context_frames": 5,
            "initial_codec_chunk_frames": 0,
        }
        voices = [Voice(talker, random_codes(40 + 9 * i, seed=i)) for i in range(3)]
        self.prompts = [
            (v.ids.tolist(), v.info, {"cache_salt": v.ref.audio_sha256})
            for v in (voices[number % 3] for number in range(5))
        ]  # two of a voice and text among them
        texts = talker._get_tokenizer().encode("The keeper counts the ships.")
        self.prompts[3] = (texts, {}, {})

    def decoded(self, ids, rows, update, generator):
        hidden, text_step = update.pop("mtp_inputs")
        rows, codes = self.talker.talker_mtp(
            ids, rows, hidden, text_step, generator=generator
        )
        update["codes"] = {"audio": codes}
        return rows

    def sample(self, drawn, info, num_spoken):
        generator = torch.Generator().manual_seed(drawn)
        hidden = torch.randn(1, 256, generator=generator, dtype=torch.bfloat16)
        merge(info, self.talker.postprocess(hidden))
        code = drawn % 4_096 if num_spoken >= self.num_silent else 7
        return self.talker._semantic_begin_id + code

    def outputs(self, infos):
        self.talker.set_batch_req_ids([])
        return [{"audio_codes": info["codes"]["audio"]} for info in infos]

    def ended(self, request_ids):
        self.talker.on_requests_finished(request_ids)

    def received(self, data):
        codes = data.codes.audio.reshape(10, -1).T
        return codes[data.meta.left_context_size or 0 :].tolist()

    def check_sent(self, _number, spoken, frames):
        # The last token that is sampled is not decoded: no frame comes of it.
        first = self.talker._semantic_begin_id
        assert [frame[0] for frame in frames] == [
            token - first for token in spoken[:-1]
        ]

    def num_kept(self):
        return len(self.talker._spoken)
