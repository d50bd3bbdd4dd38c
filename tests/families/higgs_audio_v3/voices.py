"""Steps of a talker as the host's runner makes them, and voices in its memory."""

from typing import Any

import torch
from vllm_omni.model_executor.models.higgs_audio_v3 import higgs_audio_v3_talker as host
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    apply_delay_pattern,
)

from tests.families.higgs_audio_v2 import voices as higgs_audio_v2
from tests.families.higgs_audio_v2.voices import begin_step
from vllm_tts_cache.families.higgs_audio_v3 import worker
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.higgs_audio_v3.prompt import PromptBuilder

TEXT = "The keeper counts the ships, and then counts them again."
SPOKEN = "What is said in the reference."


class Bench(higgs_audio_v2.Bench):
    takes_room, table = (worker, "apply_delay_pattern"), "model.embed_tokens"
    builder, mode, codec, ends = PromptBuilder, IN_CONTEXT, CODEC, FAMILY.failure_id

    @torch.inference_mode()
    def rows(self, requests):
        """Those that the layers would be given in a step."""
        names, voices, begins, ends, infos = zip(*requests, strict=True)
        spans = [v.ids[b:e] for v, b, e in zip(voices, begins, ends, strict=True)]
        begin_step(self.talker, spans, names)
        places = [torch.arange(b, e) for b, e in zip(begins, ends, strict=True)]
        computed = []
        run = self.talker._run_qwen3_layers_mlp_graph
        self.talker._run_qwen3_layers_mlp_graph = lambda _positions, rows: (
            computed.append(rows.clone()) or rows
        )
        try:
            ids, positions = torch.cat(spans), torch.cat(places).to(spans[0].device)
            self.talker.forward(ids, positions, model_intermediate_buffer=[*infos])
        finally:
            self.talker._run_qwen3_layers_mlp_graph = run
        (rows,) = computed
        return rows.split([len(span) for span in spans])

    @torch.inference_mode()
    def hosts(self, voice):
        """Of what its own adapter sends, by nothing but its code."""
        delayed = apply_delay_pattern(torch.tensor(voice.codes).long())
        sent = {
            "audio_input_ids": delayed,
            "audio_input_ids_mask": torch.ones(len(delayed), dtype=torch.bool),
            "audio_placeholder_positions": voice.where.start
            + torch.arange(len(delayed)),
        }
        begin_step(self.talker, [voice.ids], ["host"])
        rows = self.talker.model.embed_tokens(voice.ids)
        stock: Any = host.HiggsAudioV3TalkerForConditionalGeneration
        positions = torch.arange(len(voice.ids))
        put_in = stock._apply_ref_audio_substitution
        return (put_in(self.talker, rows, voice.ids, positions, [sent]),)
