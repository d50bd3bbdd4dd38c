"""Clips whose encodings are in a worker's memory, and what the API process sends."""

import torch
from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

from tests.audio_clips import voiced
from tests.families.runner import StoredVoice, as_the_runner_says, merge
from tests.real_scheduler import STOP
from vllm_tts_cache.families.cosyvoice3.family import (
    CROSS_LINGUAL,
    FAMILY,
    MEL,
    SPEAKER,
    TOKENS,
    ZERO_SHOT,
)
from vllm_tts_cache.families.cosyvoice3.positions import num_used_tokens, used_tokens
from vllm_tts_cache.families.cosyvoice3.prompt import (
    PromptBuilder,
    load_tokenizer,
    texts_of,
)
from vllm_tts_cache.families.cosyvoice3.worker import handed_on

RATE_HZ = 24_000
TEXT = "The keeper counts the ships, and then counts them again."
TRANSCRIPT = "What is said in the reference. 你好"
INSTRUCTIONS = "Please speak as softly as you can."


class Voice(StoredVoice):
    """A clip, and what of its encodings is used."""

    def __init__(self, talker, seconds=3.3, pitch_hz=220.0):
        samples = voiced(RATE_HZ, seconds, pitch_hz=pitch_hz)[:, 0]
        speakers = talker.tts_cache_speakers
        super().__init__(speakers, samples, RATE_HZ, FAMILY.encoders)
        self.num_tokens = num_used_tokens(self.audio.num_samples, RATE_HZ)
        self.tokens, self.mel, self.vector = (
            self.encodings[name][name] for name in (TOKENS, MEL, SPEAKER)
        )
        assert self.num_tokens == used_tokens(len(self.tokens), len(self.mel))

    def used(self):
        """What the decoder is to be told, under the host's names."""
        n = self.num_tokens
        return {
            "speech_token": torch.tensor(self.tokens[:n], dtype=torch.int32)[None],
            "speech_feat": torch.tensor(self.mel[: 2 * n])[None],
            "embedding": torch.tensor(self.vector)[None],
        }

    def remember(self, **arrays):
        kept = {TOKENS: self.tokens, MEL: self.mel, SPEAKER: self.vector, **arrays}
        super().remember(**{name: {name: array} for name, array in kept.items()})


class Prompts:
    """Builds what the API process sends to speak with a voice."""

    def __init__(self, checkpoint):
        self.tokenizer = load_tokenizer(str(checkpoint), None, CosyVoice3Config())
        self._builder = PromptBuilder(self.tokenizer)

    def __call__(self, voice, mode, text=TEXT):
        texts = texts_of(mode, text, transcript=TRANSCRIPT, instructions=INSTRUCTIONS)
        return self._builder.clone(texts, mode=mode, clip=voice)


class Request:
    """What the v1 runner keeps of a request, and how it asks for its rows."""

    def __init__(self, name, prompt):
        self.name = name
        self.num_tokens = len(prompt["prompt_token_ids"])
        self.info = dict(prompt["additional_information"])
        self.num_computed = 0

    @torch.inference_mode()
    def step(self, talker, num_tokens=None, ids=None):
        """The rows of a span: of the whole prompt, unless told otherwise."""
        if num_tokens is None:
            num_tokens = self.num_tokens
        if ids is None:
            ids = torch.ones(num_tokens, dtype=torch.int32)
        said = as_the_runner_says(self.name, self.num_computed, self.num_tokens)
        self.info |= said
        found, rows, update = talker.preprocess(ids, None, **self.info)
        assert torch.equal(found, ids) and len(rows) == len(ids)
        merge(self.info, update)
        self.num_computed += len(ids)
        return rows


class Speech:
    """Of a talker, in the shared tests of preemption."""

    processor = "talker2code2wav_async_chunk"
    num_blocks = 18  # one of them is the null block

    def __init__(self, talker, checkpoint):
        self.talker = talker
        self.connector = {"codec_chunk_frames": 15, "codec_vocab_size": 6_561}
        ours = Prompts(checkpoint)
        voices = [Voice(talker, 1.5 + 0.6 * n, 200.0 + 70 * n) for n in range(3)]
        self.voices = [voices[number % 3] for number in range(5)]
        prompts = [
            ours(
                voice, (ZERO_SHOT, CROSS_LINGUAL)[number % 2], f"Text number {number}."
            )
            for number, voice in enumerate(self.voices)
        ]
        self.prompts = [
            (made["prompt_token_ids"], made["additional_information"], {})
            for made in prompts
        ]

    def decoded(self, _ids, rows, _update, _generator):
        return rows

    def sample(self, drawn, _info, _num_spoken):
        return STOP + 1 + drawn % (6_561 - STOP - 1)

    def outputs(self, infos):
        told = handed_on(infos, once=True).get("embed", {})
        return [
            {"hidden": torch.zeros(1)}
            | {f"embed.{name}": each[index] for name, each in told.items()}
            for index in range(len(infos))
        ]

    def ended(self, _request_ids):
        pass

    def received(self, data):
        """Codes, and once what the voice is."""
        parts = []
        if data.codes is not None:
            parts.append(data.codes.audio.tolist())
        if (told := data.embed) is not None:
            names = ("speech_token", "speech_feat", "embedding")
            parts.append({name: getattr(told, name).tolist() for name in names})
        return parts

    def check_sent(self, number, spoken, parts):
        # Each chunk has all codes from the first one on.
        *chunks, whole = [part for part in parts if isinstance(part, list)]
        assert whole == spoken
        assert all(whole[: len(chunk)] == chunk for chunk in chunks)
        assert len({len(chunk) for chunk in (*chunks, whole)}) == len(chunks) + 1
        (told,) = [part for part in parts if isinstance(part, dict)]
        for name, tensor in self.voices[number].used().items():
            assert told[name] == tensor.tolist()

    def num_kept(self):
        return 0
