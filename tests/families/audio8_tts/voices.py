"""A stand-in for the talker, of random numbers, and voices in its memory."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.families.audio8_tts.case import Tokenizer
from tests.families.runner import StoredVoice, as_the_runner_says, forced_ids
from tests.in_process_workers import SpectrumEncoder, clip, worker_speakers
from vllm_tts_cache.families.audio8_tts.family import FAMILY
from vllm_tts_cache.families.audio8_tts.prompt import PromptBuilder, SemanticCodes
from vllm_tts_cache.families.audio8_tts.worker import CachedAudio8SlowAR
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.model_executor.failed_requests import (
    FailedRequests,
    SuspectPrefixes,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

HIDDEN, NUM_CODEBOOKS, CODEBOOK = 16, 10, 4096
FIRST, LAST, END, PAD = 300, 300 + CODEBOOK - 1, 290, 291
TEXT, SPOKEN = "Hello.", "What is said."
NUM_FRAMES = 73


class CodesEncoder(SpectrumEncoder):
    """Random codes, others for each clip."""

    def encode(self, audio):
        seed = int(audio.audio_sha256[:8], 16)
        codes = np.random.default_rng(seed).integers(0, 1024, (NUM_FRAMES, 10))
        return Encoding({"codes": codes.astype(np.int16)})


@contextmanager
def stand_in(directory):
    talker: Any = CachedAudio8SlowAR.__new__(CachedAudio8SlowAR)
    nn.Module.__init__(talker)
    generator = torch.Generator().manual_seed(0)
    words = nn.Embedding(LAST + 1, HIDDEN)
    codes = nn.Embedding(NUM_CODEBOOKS * CODEBOOK, HIDDEN)
    for table in (words, codes):
        nn.init.normal_(table.weight, generator=generator)
        table.weight.requires_grad_(False)
    talker.model = SimpleNamespace(embed_input_ids=words)
    talker.words = words  # so that it is moved with the talker
    talker.codebook_embeddings = codes
    talker._num_codebooks, talker._codebook_size = NUM_CODEBOOKS, CODEBOOK
    talker._semantic_begin_id, talker._semantic_end_id = FIRST, LAST
    talker._num_semantic_ids = CODEBOOK
    talker._eos_token_id, talker._pad_token_id = END, PAD
    talker._ras_window_size = 0
    talker._tokenizer = Tokenizer()
    talker._failed_requests = FailedRequests(FAMILY.failure_id or 0)
    talker._suspect_prefixes = SuspectPrefixes()
    talker._requests_of_rows = []
    speakers = worker_speakers(directory, [CodesEncoder("codec")])
    talker.tts_cache_speakers = speakers
    yield talker
    speakers.close()


class Voice(StoredVoice):
    """A clip, and its prompt."""

    def __init__(self, talker, seed, spoken):
        audio, speakers = clip(seed), talker.tts_cache_speakers
        rate_hz = audio.sample_rate_hz
        super().__init__(speakers, audio.samples, rate_hz, FAMILY.encoders)
        self.codes, self.spoken = self.encodings["codec"]["codes"], spoken
        key = EncodingKey(
            audio_sha256=self.ref.audio_sha256, encoder_fingerprint="f" * 64
        )
        builder = PromptBuilder(tokenizer=Tokenizer(), first_semantic_id=FIRST)
        semantic = SemanticCodes.of(key, self.codes)
        made = builder.clone(TEXT, spoken, ref=self.ref, semantic=semantic)
        self.ids = torch.tensor(made["prompt_token_ids"])
        self.info = made["additional_information"]
        self.where = ReferenceRows.from_info(self.info)


class Bench:
    """In the shared tests of references' rows."""

    def __init__(self, talker, _checkpoint):
        self.talker = talker
        self.takes_room = (talker.codebook_embeddings, "forward")

    def voice(self, number=0, spoken=SPOKEN):
        return Voice(self.talker, number, spoken)

    def rows(self, requests):
        made = []
        for name, voice, begin, end, info in requests:
            said = as_the_runner_says(name, begin, len(voice.ids))
            span = voice.ids[begin:end]
            ids, rows, update = self.talker.preprocess(span, None, **info, **said)
            assert torch.equal(ids, torch.full_like(ids, PAD))
            assert not update["codes"]["audio"].any()
            assert update["codes"]["audio"].shape == (len(rows), NUM_CODEBOOKS)
            made.append(rows)
        return made

    def hosts(self, voice):
        """By its own embedding of a clone."""
        codes = torch.tensor(voice.codes, dtype=torch.long)
        return (self.talker._embed_voice_clone_prompt(TEXT, voice.spoken, codes),)

    def plain(self):
        """Without pinned memory, which the host would take."""
        given = SimpleNamespace(ids=torch.arange(40), info={})
        return given, self.talker.embed_input_ids(given.ids).to(torch.bfloat16)

    def ended(self, *names):
        return forced_ids(self.talker, FAMILY.failure_id, names)
