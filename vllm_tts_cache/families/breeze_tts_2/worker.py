"""The Breeze-TTS-2 talker, taking its reference codes by content address."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.model_executor.models.breeze_tts_2 import modeling_breeze as host
from vllm_omni.model_executor.models.breeze_tts_2.prompt import CFG_UNCOND_SUFFIX

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.breeze_tts_2.family import CODEC, FAMILY
from vllm_tts_cache.families.breeze_tts_2.prompt import CONDITIONING, WAVEFORM
from vllm_tts_cache.families.networks.rows import checked_codes
from vllm_tts_cache.model_executor.talker import CachedTalker, on_device
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array


@dataclass(frozen=True, slots=True, eq=False)
class KnownCodes:
    """What stands in a request where the host has a waveform.

    Attributes:
        codes: ``(num_frames, num_codebooks)`` int64, where the talker computes.
    """

    codes: torch.Tensor


class CachedBreezeTalker(  # pyright: ignore[reportIncompatibleMethodOverride]
    CachedTalker, host.BreezeForConditionalGeneration
):
    """The host's talker; only the codes of a reference are ours.

    Two requests speak a text with guidance, one of them without the instruction. Each
    names the speaker, and each is given the codes.
    """

    tts_cache_family = FAMILY

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._give_known_codes()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker, then our own encoder: no request pays for it."""
        loaded = super().load_weights(weights)
        self._load_speakers(self.vllm_config)
        return loaded

    @torch.inference_mode()
    def preprocess_batch(
        self,
        *,
        req_ids: list[str],
        model_intermediate_buffer: dict[str, dict[str, Any]],
        device: torch.device,
    ) -> None:
        """Build what requests begin with as the host does, from codes that are stored.

        Never raises for a request that names a speaker: it fails alone instead.
        """
        beginning = [
            (request_id, info)
            for request_id in req_ids
            if FIELD in (info := model_intermediate_buffer[request_id])
            and "breeze_state" not in info
        ]
        for request_id, info in beginning:
            info[WAVEFORM] = self._reference({**info, "request_id": request_id})
        self._fail_in_pairs(beginning)
        try:
            super().preprocess_batch(
                req_ids=req_ids,
                model_intermediate_buffer=model_intermediate_buffer,
                device=device,
            )
        finally:
            for _, info in beginning:
                info.pop(WAVEFORM, None)

    def make_omni_output(self, model_outputs: torch.Tensor, **given: Any) -> Any:
        """As the host; no frame of a request that has failed goes on to be heard."""
        output: Any = super().make_omni_output(model_outputs, **given)
        frames = output.multimodal_outputs.get("codes", {}).get("audio", ())
        infos = given.get("model_intermediate_buffer") or ()
        for index, (of_request, info) in enumerate(zip(frames, infos, strict=True)):
            if self._has_failed(info):
                frames[index] = of_request[:0]
        return output

    def _fail_in_pairs(self, beginning: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Let one branch fail with the other: a lone one would end the engine."""
        pairs = defaultdict(list)
        for request_id, info in beginning:
            named = {**info, "request_id": request_id}
            pairs[_pair_of(info)].append((self._has_failed(named), named))
        for branches in pairs.values():
            if any(failed for failed, _ in branches):
                for failed, named in branches:
                    if not failed:
                        self._fail(named, TTSCacheError("its other branch failed"))

    def _give_known_codes(self) -> None:
        """Have the host's encoder pass on what is known, and encode only the rest."""
        encoder: Any = self.reference_encoder
        encoder.encode_batch = passing_on_known_codes(encoder.encode_batch)

    def _reference(self, info: Mapping[str, Any]) -> KnownCodes:
        num_frames = info[CONDITIONING]["reference_frames"]
        codes: torch.Tensor | None = None
        if not self._has_failed(info):
            try:
                codes = torch.tensor(self._codes(info, num_frames), dtype=torch.long)
                self._count_prompt()
            except Exception as exc:  # noqa: BLE001  raising would end the engine
                self._fail(info, exc)
        if codes is None:  # harmless: the request ends with the id that is forced
            codes = torch.zeros(num_frames, self.num_codebooks, dtype=torch.long)
        offsets: Any = self.offsets
        return KnownCodes(on_device(codes.numpy(), offsets.device))

    def _codes(self, info: Mapping[str, Any], num_frames: int) -> Array:
        """``(num_frames, num_codebooks)``, each inside its codebook.

        Raises: TTSCacheError, ValueError: they cannot be had, or are not such.
        """
        if (ref := SpeakerRef.from_info(info)) is None:
            raise TTSCacheError("it names nobody")
        codes = self._encodings(ref, (CODEC,))[CODEC]["codes"]
        expected = (num_frames, self.num_codebooks)
        return checked_codes(codes, expected, self.codebook_size)


def _pair_of(info: Mapping[str, Any]) -> str:
    """Name what the two branches of a guided request have in common."""
    request_id: str = info["global_request_id"][0]
    if info[CONDITIONING]["role"] != "uncond":
        return request_id
    return request_id.removesuffix(CFG_UNCOND_SUFFIX)


Encode = Callable[[list[torch.Tensor], list[int]], list[torch.Tensor]]


def passing_on_known_codes(
    encode: Encode,
) -> Callable[[Sequence[torch.Tensor | KnownCodes], Sequence[int]], list[torch.Tensor]]:
    """Return the host's ``encode_batch`` for a batch that has known codes in it."""

    def encode_batch(
        given: Sequence[torch.Tensor | KnownCodes], frame_counts: Sequence[int]
    ) -> list[torch.Tensor]:
        unknown = [
            (waveform, num_frames)
            for waveform, num_frames in zip(given, frame_counts, strict=True)
            if not isinstance(waveform, KnownCodes)
        ]
        encoded = iter(())
        if unknown:
            waveforms, counts = map(list, zip(*unknown, strict=True))
            encoded = iter(encode(waveforms, counts))
        return [
            each.codes if isinstance(each, KnownCodes) else next(encoded)
            for each in given
        ]

    return encode_batch
