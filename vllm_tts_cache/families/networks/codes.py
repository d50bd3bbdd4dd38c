"""A reference's codes, looked at before a talker looks anything up by them."""

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.store.encoding import Array


def checked_codes(codes: Array, expected: tuple[int, int], codebook_size: int) -> Array:
    """Return them if they are what a prompt was made for, each inside its codebook.

    Args:
        codes: ``(num_frames, num_codebooks)`` integers.
        expected: That shape, as the prompt has room for it.
        codebook_size: Codes of one codebook.

    Raises: TTSCacheError; ValueError if there is none.
    """
    if codes.shape != expected:
        raise TTSCacheError(
            f"its codes are {codes.shape}, and its prompt was made for {expected}"
        )
    if codes.min() < 0 or codes.max() >= codebook_size:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("a code of it is outside of its codebook")
    return codes
