"""The Breeze-TTS-2 talker, taking its reference codes by content address."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.breeze_tts_2 import modeling_breeze as host
from vllm_omni.model_executor.models.breeze_tts_2.prompt import CFG_UNCOND_SUFFIX

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.breeze_tts_2.prompt import CONDITIONING, WAVEFORM
from vllm_tts_cache.families.networks.prompts import KnownEncoding, checked_codes
from vllm_tts_cache.model_executor import talker
from vllm_tts_cache.model_executor.talker import Built
from vllm_tts_cache.speaker.reference import FIELD


class CachedBreezeTalker(talker.CachedTalker, host.BreezeForConditionalGeneration):
    """The host's talker with a reference's codes from stored encodings.

    With guidance the host runs two requests for a text, one of them without the
    instruction. Both name the speaker, and both get the speaker's codes.
    """

    tts_cache_family = FAMILY

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        encoder: Any = self.reference_encoder
        encoder.encode_batch = passing_on_known_codes(encoder.encode_batch)

    @torch.inference_mode()
    def preprocess_batch(
        self,
        *,
        req_ids: list[str],
        model_intermediate_buffer: dict[str, dict[str, Any]],
        device: torch.device,
    ) -> None:
        """Build the states of new requests as the host does, from stored codes.

        A request that cannot begin fails with its other branch only, see `_fail`.
        """
        pending = {
            request_id: info
            for request_id in req_ids
            if "breeze_state" not in (info := model_intermediate_buffer[request_id])
        }
        for request_id, info in pending.items():
            if CONDITIONING not in info:  # it came by a route that builds no prompt
                self._fail({"request_id": request_id}, TTSCacheError("it has no text"))
                info.update(_without_text(request_id))
            if FIELD in info:
                info[WAVEFORM] = self._reference({**info, "request_id": request_id})
        self._fail_in_pairs({i: info for i, info in pending.items() if FIELD in info})
        try:
            self._begin(pending, device)
        finally:
            for info in pending.values():
                if FIELD in info:
                    info.pop(WAVEFORM, None)

    def _begin(self, pending: dict[str, dict[str, Any]], device: torch.device) -> None:
        host: Any = super()

        def begin(infos: dict[str, dict[str, Any]]) -> None:
            host.preprocess_batch(
                req_ids=list(infos), model_intermediate_buffer=infos, device=device
            )

        try:
            begin(pending)
        except Exception:  # noqa: BLE001  raising here would end the engine
            for pair in _in_pairs(pending):
                try:
                    begin(pair)
                except Exception as exc:  # noqa: BLE001
                    for request_id, info in pair.items():
                        self._fail({**info, "request_id": request_id}, exc)

    @talker.failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build a span as the host does, from the state of `preprocess_batch`."""
        return super().preprocess(input_ids, input_embeds, **info)

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """Return harmless rows for a failed request; its first sampled id ends it."""
        del info
        state = {
            "generator": torch.Generator(device=input_ids.device).manual_seed(0),
            "history": input_ids.new_empty((1, 0)),
            "current": input_ids.new_zeros((1, self.num_codebooks)),
        }
        return input_ids, self.embed_input_ids(input_ids), {"breeze_state": state}

    def make_omni_output(self, model_outputs: Tensor, **given: Any) -> Any:
        """Make the host's output without the frames of failed requests."""
        output: Any = super().make_omni_output(model_outputs, **given)
        frames = output.multimodal_outputs.get("codes", {}).get("audio", ())
        infos = given.get("model_intermediate_buffer") or ()
        for index, (of_request, info) in enumerate(zip(frames, infos, strict=True)):
            if self._has_failed(info):
                frames[index] = of_request[:0]
        return output

    def _fail_in_pairs(self, beginning: dict[str, dict[str, Any]]) -> None:
        """Fail both branches if one has failed: a lone branch would end the engine."""
        for pair in _in_pairs(beginning):
            named = [{**info, "request_id": each} for each, info in pair.items()]
            failed = [self._has_failed(info) for info in named]
            if any(failed):
                for info, has_failed in zip(named, failed, strict=True):
                    if not has_failed:
                        self._fail(info, TTSCacheError("its other branch failed"))

    def _reference(self, info: Mapping[str, Any]) -> KnownEncoding:
        """Return codes on the device, ``(num_frames, num_codebooks)`` int64."""
        num_frames = info[CONDITIONING].get("reference_frames", 0)
        codes: Tensor | None = None
        if not self._has_failed(info):
            try:
                found = self._only_encoding(self._speaker(info))["codes"]
                expected = (num_frames, self.num_codebooks)
                known = checked_codes(found, expected, self.codebook_size)
                codes = torch.tensor(known, dtype=torch.long)
                self._count_prompt()
            except Exception as exc:  # noqa: BLE001  raising would end the engine
                self._fail(info, exc)
        if codes is None:  # harmless: the request ends with the id that is forced
            codes = torch.zeros(num_frames, self.num_codebooks, dtype=torch.long)
        offsets: Any = self.offsets
        return KnownEncoding(talker.on_device(codes.numpy(), offsets.device))


def _in_pairs(
    infos: Mapping[str, dict[str, Any]],
) -> Collection[dict[str, dict[str, Any]]]:
    """Group the two branches of each guided request."""
    pairs: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for request_id, info in infos.items():
        of_both: str = info["global_request_id"][0]
        if info[CONDITIONING]["role"] == "uncond":
            of_both = of_both.removesuffix(CFG_UNCOND_SUFFIX)
        pairs[of_both][request_id] = info
    return pairs.values()


def _without_text(request_id: str) -> dict[str, Any]:
    """Return the fields that the host reads of a request, for one without a text."""
    return {
        CONDITIONING: {"target_ids": [0], "role": "cond", "guidance_scale": 1.0},
        "breeze_sampling": {
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
        },
        "global_request_id": [request_id],
    }


Encode = Callable[[list[Tensor], list[int]], list[Tensor]]


def passing_on_known_codes(
    encode: Encode,
) -> Callable[[Sequence[Tensor | KnownEncoding], Sequence[int]], list[Tensor]]:
    """Wrap the host's ``encode_batch`` for batches that may hold known codes."""

    def encode_batch(
        given: Sequence[Tensor | KnownEncoding], frame_counts: Sequence[int]
    ) -> list[Tensor]:
        pairs = zip(given, frame_counts, strict=True)
        unknown = [pair for pair in pairs if not isinstance(pair[0], KnownEncoding)]
        lists: Any = map(list, zip(*unknown, strict=True))
        encoded = iter(encode(*lists) if unknown else ())
        return [
            each.value if isinstance(each, KnownEncoding) else next(encoded)
            for each in given
        ]

    return encode_batch
