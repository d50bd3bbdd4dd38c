"""Steps of a talker as the host's runner makes them, and voices in its memory."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v2 import higgs_audio_v2_talker as host
from vllm_omni.model_executor.models.higgs_audio_v2.higgs_audio_v2_tokenizer import (
    _build_delay_pattern,
)

from tests.audio_clips import voiced
from tests.families.runner import PromptedVoice, forced_ids
from vllm_tts_cache.families.higgs_audio_v2 import worker
from vllm_tts_cache.families.higgs_audio_v2.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.higgs_audio_v2.prompt import PromptBuilder

RATE_HZ = 24_000
TEXT, SPOKEN = "The keeper counts the ships.", "What is said in the reference."


def as_stock(talker):
    """The host's own talker, on the same weights."""
    stock = copy.copy(talker)
    stock.__class__ = host.HiggsAudioV2TalkerForConditionalGeneration
    stock._audio_state, stock._slot_output_len = {}, {}
    return stock


def begin_step(talker, spans, request_ids):
    """What the runner says of a step before it is computed."""
    ends, ids = np.cumsum([0, *map(len, spans)]), torch.cat(list(spans))
    talker.update_decode_step_metadata(
        input_ids=ids,
        omni_query_start_loc=torch.tensor(ends, dtype=torch.int32).to(ids.device),
        req_ids=list(request_ids),
    )


def rows_of(talker, spans, begins, infos, request_ids=("one", "other", "third")):
    """The rows that the layers would be given in a step."""
    ids = torch.cat(list(spans))
    if hasattr(talker, "update_decode_step_metadata"):  # the host's own has not
        begin_step(talker, spans, request_ids[: len(spans)])
    positions = torch.cat(
        [torch.arange(b, b + len(s)) for b, s in zip(begins, spans, strict=True)]
    ).to(ids.device)
    computed = []

    class Seen(Exception):
        pass

    def layer(_positions, rows, *_, **__):
        computed.append(rows.clone())
        raise Seen

    forward, talker.layers[0].forward = talker.layers[0].forward, layer
    try:
        with torch.inference_mode(), pytest.raises(Seen):
            talker.forward(ids, positions, model_intermediate_buffer=infos)
    finally:
        talker.layers[0].forward = forward
    return computed[0].split([len(span) for span in spans])


class Bench:
    """In the shared tests of references' rows."""

    takes_room, table = (worker, "_build_delay_pattern"), "embed_tokens"
    builder, mode, codec, ends = PromptBuilder, IN_CONTEXT, CODEC, FAMILY.failure_id

    def __init__(self, talker, checkpoint):
        self.talker = talker
        self._builder = self.builder(AutoTokenizer.from_pretrained(checkpoint))

    def voice(self, number=0, spoken=SPOKEN):
        def prompted(clip):
            return self._builder.clone(TEXT, spoken, mode=self.mode, clip=clip)

        samples = voiced(RATE_HZ, 3.3, pitch_hz=220.0 + 110 * number)[:, 0]
        return PromptedVoice(self.talker, samples, RATE_HZ, self.codec, prompted)

    def rows(self, requests):
        names, voices, begins, ends, infos = zip(*requests, strict=True)
        spans = [v.ids[b:e] for v, b, e in zip(voices, begins, ends, strict=True)]
        return rows_of(self.talker, spans, begins, list(infos), names)

    @torch.inference_mode()
    def hosts(self, voice) -> tuple[Any, ...]:
        """By its embedding of what its adapter sends, and by its substitution."""
        from vllm import forward_context

        delayed = _build_delay_pattern(torch.tensor(voice.codes.T).long()).T
        first, end = voice.where.start, voice.where.start + voice.where.num_rows
        assert len(delayed) == voice.where.num_rows
        rows = self.talker.embed_tokens(voice.ids)
        embedded, offsets = rows.clone(), self.talker.audio_tokens_offsets
        summed = self.talker.audio_codebook_embeddings(delayed + offsets).sum(dim=-2)
        embedded[first:end] = summed.to(rows.dtype)
        ends = torch.tensor([0, len(voice.ids)], dtype=torch.int32)
        context = SimpleNamespace(attn_metadata=SimpleNamespace(query_start_loc=ends))
        sent = {
            "audio_input_ids": delayed,
            "audio_input_ids_mask": torch.ones(len(delayed), dtype=torch.bool),
        }
        put_in = host.HiggsAudioV2TalkerForConditionalGeneration
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_context, "get_forward_context", lambda: context)
            substituted = put_in._maybe_apply_ref_audio_substitution(
                self.talker, rows, voice.ids, [sent]
            )
        return embedded, substituted

    def plain(self):
        ids = torch.arange(300, 340)
        given = SimpleNamespace(ids=ids, info={"generated_len": 0})
        return given, self.talker.get_submodule(self.table)(ids)

    def ended(self, *names):
        return forced_ids(self.talker, self.ends, names)
