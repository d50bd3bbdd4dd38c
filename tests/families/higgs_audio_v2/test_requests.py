"""Higgs Audio v2 requests through the host's real routes, serving class and adapter."""

from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_tokenizer as host,
)

from tests.families.serving import anns_prompt
from vllm_tts_cache.families.higgs_audio_v2.prompt import NUM_ADDED_ROWS

SPOKEN = "What is said in it."


async def test_it_has_the_hosts_ids_and_no_audio(server, own_checkpoint, monkeypatch):
    ids, where = await anns_prompt(server, "Hello.", ref_text=SPOKEN)
    codes = torch.zeros(8, where.num_rows - NUM_ADDED_ROWS, dtype=torch.long)
    monkeypatch.setattr(host, "_encode_ref_audio_codes", lambda *_: codes)
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    expected = host.build_voice_clone_prompt(
        SimpleNamespace(tokenizer=tokenizer), "Hello.", np.zeros(9), 24_000, SPOKEN
    )
    assert ids == expected["prompt_token_ids"]
    assert len(expected["audio_input_ids"]) == where.num_rows
    placeholders = {
        tokenizer.convert_tokens_to_ids(token)
        for token in ("<|AUDIO_OUT|>", "<|reserved_special_token_6|>")
    }
    places = [at for at, token in enumerate(ids) if token in placeholders]
    assert places == list(range(where.start, where.start + where.num_rows))
