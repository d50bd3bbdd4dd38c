"""Methods of every worker, reached by ``collective_rpc(name, stage_ids=[0])``.

An RPC runs between two decode steps and every running stream waits for it, so each
of these returns at once. Only plain types and bytes cross: the host mangles the rest
silently.
A worker without a speaker side answers ``{"unsupported": reason}``.
"""

from typing import Any

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef


def tts_cache_describe(self: Any) -> dict[str, Any]:
    """Return the encoders' fingerprints: what the API process completes keys with."""
    if (speakers := _speakers(self)) is None:
        return _unsupported(self)
    return {"fingerprints": speakers.fingerprints, "rank": int(self.rank)}


def tts_cache_prepare(
    self: Any, speakers: list[list[str]], encoder_names: list[str]
) -> dict[str, Any]:
    """Start encoding what is missing; returns ``{sha256: {name: state}}`` at once.

    ``speakers`` holds ``[audio_sha256, segment]`` pairs. Rank 0 encodes; the other
    ranks load what it publishes.
    """
    if (ours := _speakers(self)) is None:
        return _unsupported(self)
    refs = [SpeakerRef.from_info({FIELD: wire}) for wire in speakers]
    encodes = int(self.rank) == 0
    states = {
        ref.audio_sha256: ours.prepare(ref, encoder_names, encodes=encodes)
        for ref in refs
        if ref is not None
    }
    return {"rank": int(self.rank), "states": states}


def tts_cache_states(self: Any, audio_sha256s: list[str]) -> dict[str, Any]:
    """Return ``{sha256: {encoder name: state}}`` without starting anything."""
    if (speakers := _speakers(self)) is None:
        return _unsupported(self)
    states = {sha: speakers.states(sha) for sha in audio_sha256s}
    return {"rank": int(self.rank), "states": states}


def tts_cache_encoding(
    self: Any, audio_sha256: str, encoder_name: str
) -> dict[str, Any]:
    """Return ``{"encoding": bytes or None}``: one encoding as it is stored.

    For an API process that cannot read it from the disk.
    """
    if (speakers := _speakers(self)) is None:
        return _unsupported(self)
    return {"encoding": speakers.stored_encoding(audio_sha256, encoder_name)}


def tts_cache_forget(self: Any, audio_sha256s: list[str]) -> dict[str, Any]:
    """Drop these audios' encodings from every tier and acknowledge."""
    if (speakers := _speakers(self)) is None:
        return _unsupported(self)
    try:
        return {"forgotten": speakers.forget(audio_sha256s)}
    except TTSCacheError as exc:  # the host would bury it; say it in our own words
        return {"failed": str(exc)}


def tts_cache_stats(self: Any) -> dict[str, Any]:
    """Return counters and sizes."""
    if (speakers := _speakers(self)) is None:
        return _unsupported(self)
    return {"rank": int(self.rank), **speakers.stats()}


METHODS = (
    tts_cache_describe,
    tts_cache_prepare,
    tts_cache_states,
    tts_cache_encoding,
    tts_cache_forget,
    tts_cache_stats,
)


def _speakers(worker: Any) -> WorkerSpeakers | None:
    # Workers of every stage and of every model carry these methods.
    runner = getattr(worker, "model_runner", None)
    return getattr(getattr(runner, "model", None), "tts_cache_speakers", None)


def _unsupported(worker: Any) -> dict[str, Any]:
    model = type(getattr(getattr(worker, "model_runner", None), "model", None)).__name__
    return {"unsupported": f"{model} clones no voices"}
