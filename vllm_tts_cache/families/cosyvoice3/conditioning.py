"""What the decoder is told of a voice: its tokens, its mel and its speaker's vector.

The host hands them over with the step's *new* requests, in their order, and takes them
off again by the place in the whole batch: beside a running request, two new ones speak
with each other's voice. Here they lie with their request, where the runner keeps what
is its own, and are handed on from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.cosyvoice3.positions import (
    MEL_FRAMES_PER_TOKEN,
    used_tokens,
)
from vllm_tts_cache.families.cosyvoice3.prompt import TEXT_IDS
from vllm_tts_cache.families.networks.prompts import MODE
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Array

# As the host calls what the decoder is told.
EMBED = "embed"
CODES, FRAMES, VECTOR = _NAMES = ("speech_token", "speech_feat", "embedding")
NUM_MELS, VECTOR_SIZE = 80, 192
_OURS = frozenset({FIELD, MODE, TEXT_IDS})


def conditioning_of(
    codes: Array, mel: Array, vector: Array, *, num_codes: int
) -> dict[str, Tensor]:
    """Return a voice's encodings on the CPU, cut alike and under the host's names.

    Args:
        codes: Its speech tokens.
        mel: Two frames of each, or nearly.
        vector: Its speaker's.
        num_codes: Of the model.

    Raises: TTSCacheError if they are not such.
    """
    shapes = codes.ndim, mel.shape[1:], vector.shape
    if shapes != (1, (NUM_MELS,), (VECTOR_SIZE,)):
        raise TTSCacheError(
            f"its encodings are {codes.shape}, {mel.shape} and {vector.shape}, and "
            f"the decoder takes mels of {NUM_MELS} and vectors of {VECTOR_SIZE}"
        )
    if codes.min() < 0 or codes.max() >= num_codes:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("a speech token of it is no code")
    num_tokens = used_tokens(len(codes), len(mel))
    return {
        CODES: torch.tensor(codes[:num_tokens], dtype=torch.int32)[None],
        FRAMES: torch.tensor(mel[: MEL_FRAMES_PER_TOKEN * num_tokens])[None],
        VECTOR: torch.tensor(vector)[None],
    }


def handed_on(infos: Sequence[Mapping[str, Any]], *, once: bool) -> dict[str, Any]:
    """What the decoder is told of each request of a step, in the batch's order.

    The runner gives a request the entry at its place, so every request has one. Where
    nobody begins there is nothing to tell.

    Args:
        infos: What the runner keeps of each request.
        once: Whether the sender takes in a request's first entry, as it does of a
            speech in chunks, and no later one: then a running request's is empty. Else
            it takes in the last, and is told the same again.
    """
    begins = [info.get("_omni_is_prefill", True) for info in infos]
    if not any(begins):
        return {}
    told = [
        (info.get(EMBED) if is_new or not once else None) or _nothing()
        for info, is_new in zip(infos, begins, strict=True)
    ]
    return {EMBED: {name: [each[name] for each in told] for name in _NAMES}}


def without_ours(info: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a prompt told the talker: the decoder refuses unknown names."""
    return {name: told for name, told in info.items() if name not in _OURS}


def _nothing() -> dict[str, Tensor]:
    """Of a request that has failed, or was told of: the decoder makes nothing of it."""
    return {
        CODES: torch.zeros((1, 0), dtype=torch.int32),
        FRAMES: torch.zeros((1, 0, NUM_MELS), dtype=torch.float32),
        VECTOR: torch.zeros((1, VECTOR_SIZE), dtype=torch.float32),
    }
