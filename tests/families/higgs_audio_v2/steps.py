"""Steps of a talker as the host's runner makes them, without its engine."""

import copy

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_talker as host,
)


def as_stock(talker):
    """The host's own talker, on the same weights."""
    stock = copy.copy(talker)
    stock.__class__ = host.HiggsAudioV2TalkerForConditionalGeneration
    stock._audio_state, stock._slot_output_len = {}, {}
    return stock


def rows_of(talker, spans, begins, infos, request_ids=("one", "other", "third")):
    """The rows that the layers would be given in a step."""
    ids = torch.cat(list(spans))
    ends = np.cumsum([0, *map(len, spans)])
    # Where a model has it the runner calls it; the host's own has not.
    if (begin_step := getattr(talker, "update_decode_step_metadata", None)) is not None:
        begin_step(
            input_ids=ids,
            omni_query_start_loc=torch.tensor(ends, dtype=torch.int32),
            req_ids=list(request_ids[: len(spans)]),
        )
    positions = torch.cat(
        [torch.arange(b, b + len(s)) for b, s in zip(begins, spans, strict=True)]
    )
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
