"""The decoder's conditioning on a voice: its tokens, its mel, its speaker's vector.

The host sends conditionings in the order of a step's *new* requests, and reads them by
place in the whole batch: beside a running request, two new ones speak with each other's
voice. Here each conditioning is stored in its request's info, which the runner keeps,
and is sent from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.cosyvoice3 import positions
from vllm_tts_cache.families.cosyvoice3.prompt import TEXT_IDS
from vllm_tts_cache.families.networks.prompts import MODE
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Array

# The host's names of a conditioning and its parts.
EMBED = "embed"
CODES, FRAMES, VECTOR = _NAMES = ("speech_token", "speech_feat", "embedding")
NUM_MELS, VECTOR_SIZE = 80, 192
_TALKER_KEYS = frozenset({FIELD, MODE, TEXT_IDS})


def conditioning_of(
    codes: Array, mel: Array, vector: Array, *, num_codes: int
) -> dict[str, Tensor]:
    """Return a voice's conditioning on the CPU, under the host's names.

    Args:
        codes: The voice's speech tokens.
        mel: About two frames for each token; tokens without both frames are cut off.
        vector: The speaker's vector.
        num_codes: Number of codes that the model has.

    Raises: TTSCacheError if an encoding does not fit the decoder.
    """
    shapes = codes.ndim, mel.shape[1:], vector.shape
    if shapes != (1, (NUM_MELS,), (VECTOR_SIZE,)):
        raise TTSCacheError(
            f"its encodings are {codes.shape}, {mel.shape} and {vector.shape}, and "
            f"the decoder takes mels of {NUM_MELS} and vectors of {VECTOR_SIZE}"
        )
    if codes.min() < 0 or codes.max() >= num_codes:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("one of its speech tokens is no code of the model")
    num_tokens = positions.used_tokens(len(codes), len(mel))
    return {
        CODES: torch.tensor(codes[:num_tokens], dtype=torch.int32)[None],
        FRAMES: torch.tensor(mel[: positions.MEL_FRAMES_PER_TOKEN * num_tokens])[None],
        VECTOR: torch.tensor(vector)[None],
    }


def handed_on(infos: Sequence[Mapping[str, Any]], *, once: bool) -> dict[str, Any]:
    """Return the conditionings of a step's requests, in the batch's order.

    The runner gives a request the entry at its place, so every request has one. In a
    step in which no request begins, the result is empty.

    Args:
        infos: The runner's info of each request.
        once: Whether the sender uses only the first entry of a request, as it does for
            speech in chunks: then the entry of a running request is empty. Else it uses
            the last entry, so that of a running request is sent again.
    """
    begins = [info.get("_omni_is_prefill", True) for info in infos]
    if not any(begins):
        return {}
    conditionings = [
        (info.get(EMBED) if is_new or not once else None) or _empty_conditioning()
        for info, is_new in zip(infos, begins, strict=True)
    ]
    return {EMBED: {name: [each[name] for each in conditionings] for name in _NAMES}}


def without_ours(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info without the talker's keys: the decoder refuses unknown ones."""
    return {name: value for name, value in info.items() if name not in _TALKER_KEYS}


def _empty_conditioning() -> dict[str, Tensor]:
    """Return the empty conditioning of a request that failed, or has got its own."""
    return {
        CODES: torch.zeros((1, 0), dtype=torch.int32),
        FRAMES: torch.zeros((1, 0, NUM_MELS), dtype=torch.float32),
        VECTOR: torch.zeros((1, VECTOR_SIZE), dtype=torch.float32),
    }
