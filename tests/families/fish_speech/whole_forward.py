"""The whole slow AR of Fish Speech in one process, as a worker of the CPU platform.

Run as a program, it speaks the same requests in several batches and chunkings and
prints, as JSON, on what it ran and a digest of the bits that each request got.

It is a program because a process finds out once what its processor can do; the
environment (``ONEDNN_MAX_CPU_ISA``, ``ATEN_CPU_CAPABILITY``, ``OMP_NUM_THREADS``) and
``--kernels avx2`` lower that.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

BLOCK_TOKENS, BLOCKS_A_REQUEST = 32, 6
NUM_DECODE_STEPS = 4
PROMPT_TOKENS = {"long": 170, "middle": 65, "short": 33}


class SlowAR:
    """The model with a KV cache for as many requests as there are prompts."""

    def __init__(self, model):
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        from vllm_tts_cache.platforms.cpu_kernels import InvariantCPUAttentionBackend

        self.model = model
        self._config = model.vllm_config
        self._config.cache_config.block_size = BLOCK_TOKENS
        self._layers = get_layers_from_vllm_config(self._config, Attention)
        backend = InvariantCPUAttentionBackend
        spec: Any = None
        for layer in self._layers.values():
            assert issubclass(layer.get_attn_backend(), backend)
            spec = layer.get_kv_cache_spec(self._config)
            layer.kv_cache = self._allocated(spec)
        build: Any = backend.get_builder_cls()
        self._builder = build(
            spec, list(self._layers), self._config, torch.device("cpu")
        )

    @property
    def attention(self):
        return self._builder.isa

    @staticmethod
    def _allocated(spec):
        """Keys and values side by side, as the backend takes them."""
        num_blocks = BLOCKS_A_REQUEST * len(PROMPT_TOKENS)
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        return torch.zeros(shape, dtype=spec.dtype)

    def forward(self, spans, rows):
        """Hidden states of ``[start, end)`` of some requests' tokens, in one batch."""
        from vllm.forward_context import set_forward_context

        counts = torch.tensor([end - start for _, start, end in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        metadata = self._metadata(spans)
        built = self._builder.build(0, metadata)
        slots = dict.fromkeys(self._layers, metadata.slot_mapping)
        with set_forward_context(
            dict.fromkeys(self._layers, built),
            self._config,
            num_tokens=len(positions),
            slot_mapping=slots,
        ):
            hidden = self.model.forward(
                torch.zeros(len(positions), dtype=torch.long),
                positions,
                inputs_embeds=torch.cat(rows),
            )
        return hidden.split(counts.tolist())

    @staticmethod
    def _metadata(spans):
        from tests.attention_batch import batch_metadata

        first = [BLOCKS_A_REQUEST * index for index, _, _ in spans]
        table = torch.tensor(first)[:, None] + torch.arange(BLOCKS_A_REQUEST)
        slots = [
            BLOCKS_A_REQUEST * BLOCK_TOKENS * index + torch.arange(start, end)
            for index, start, end in spans
        ]
        queries = [(start, end) for _, start, end in spans]
        return batch_metadata(queries, table.int(), torch.cat(slots))


class Request:
    """A prompt of random tokens, then the greedy frames that follow it."""

    def __init__(self, model, index, num_tokens):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 150_000, (num_tokens,), generator=generator)
        self.index, self.model = index, model
        self.rows = model.embed_input_ids(ids)
        self.num_done = 0
        self.seen = hashlib.sha256()

    @property
    def num_left(self):
        return len(self.rows) - self.num_done

    def next_span(self, size):
        end = min(self.num_done + size, len(self.rows))
        return (self.index, self.num_done, end), self.rows[self.num_done : end]

    def saw(self, tensor):
        self.seen.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def speak(slow_ar, names, chunk):
    """Prefill the requests together in chunks, then decode them together."""
    model = slow_ar.model
    requests = {
        name: Request(model, index, length)
        for index, (name, length) in enumerate(PROMPT_TOKENS.items())
        if name in names
    }
    last = {}
    while waiting := [name for name, r in requests.items() if r.num_left]:
        step(slow_ar, requests, waiting, chunk, last)
    for _ in range(NUM_DECODE_STEPS):
        decode(model, requests, last)
        step(slow_ar, requests, list(requests), 1, last)
    return {name: request.seen.hexdigest()[:16] for name, request in requests.items()}


def step(slow_ar, requests, names, chunk, last):
    spans, rows = zip(*(requests[name].next_span(chunk) for name in names), strict=True)
    for name, hidden in zip(names, slow_ar.forward(spans, rows), strict=True):
        requests[name].num_done += len(hidden)
        requests[name].saw(hidden)
        last[name] = hidden[-1:]


def decode(model, requests, last):
    """Sample each request's next token, and its residual codes by the fast AR."""
    hidden = torch.cat([last[name] for name in requests])
    logits = model.compute_logits(hidden)
    tokens = logits.argmax(dim=-1)
    rows, codes = model.talker_mtp(
        tokens,
        model.embed_input_ids(tokens),
        hidden,
        torch.zeros_like(hidden),
        do_sample=False,
    )
    for place, request in enumerate(requests.values()):
        for part in (logits, codes, rows):
            request.saw(part[place])
        request.rows = torch.cat([request.rows, rows[place : place + 1]])


def spoken_in_every_way(slow_ar):
    """How it was batched and chunked -> request -> digest of what it got."""
    whole, together = 4096, tuple(PROMPT_TOKENS)
    ways = {
        **{f"{name} alone": ((name,), whole) for name in together},
        "all whole": (together, whole),
        "all in chunks of 64": (together, 64),
        "two in chunks of 1": (together[1:], 1),
        "two in chunks of 33": (together[:2], 33),
        "the long one in chunks of 9": (together[:1], 9),
    }
    return {way: speak(slow_ar, *arguments) for way, arguments in ways.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", choices=["avx2", "best"], default="best")
    given = parser.parse_args()
    if given.kernels == "avx2":  # by this vLLM chooses among its three libraries
        torch.cpu._is_avx512_supported = lambda: False
        torch.cpu._is_avx512_bf16_supported = lambda: False
        torch.cpu._is_amx_tile_supported = lambda: False  # not in that library
    torch.set_grad_enabled(False)

    import vllm_omni.platforms  # noqa: F401  first: it imports our platform

    from tests.families.fish_speech.case import CASE
    from tests.real_talker import loaded_talker
    from vllm_tts_cache.platforms import leave_out_matrices
    from vllm_tts_cache.platforms.cpu_kernels import separate_rows
    from vllm_tts_cache.platforms.cpu_worker import use_invariant_attention

    leave_out_matrices()
    use_invariant_attention()
    with loaded_talker(CASE, given.checkpoint, given.folder) as model:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        separate_rows(model)
        slow_ar = SlowAR(model)
        answer = {
            "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
            "aten": torch.backends.cpu.get_cpu_capability(),
            "attention": slow_ar.attention,
            "threads": torch.get_num_threads(),
            "spoken": spoken_in_every_way(slow_ar),
        }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
