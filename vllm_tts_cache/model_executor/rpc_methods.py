"""Methods that we add to the host's workers of talkers and of diffusion pipelines.

Those of the RPC are called by ``collective_rpc(name, stage_ids=[...])``. An RPC runs
between two decode steps, or two batches of a diffusion pipeline, and delays the next
one, so each method returns at once. Each takes at most one struct of `speaker.wire` and
returns one, as bytes, because the host mangles types that it does not know. None
raises, because the host would return the exception as a value: a worker without a
speaker side answers `Unsupported`, and any other error is answered as `Failed`.

``sleep``, ``discard`` and ``wake_up`` replace the host's, call them, and pause the
encode thread while vLLM's sleep mode has the GPU's memory, or that of the KV cache.
Sleep mode does not take the encoders' own memory (`encode_work` says why), so an encode
would not fail. It would take memory that was promised to others.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.model_executor.models import ModelRegistry
from vllm_omni.diffusion.registry import register_diffusion_model
from vllm_omni.engine import arg_utils
from vllm_omni.engine.arg_utils import register_omni_models_to_vllm
from vllm_omni.model_executor.models.registry import OmniModelRegistry

from vllm_tts_cache import Patch, patch_once
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.family import families

if TYPE_CHECKING:
    from vllm_tts_cache.model_executor.decoder_states import DecoderStates
    from vllm_tts_cache.model_executor.speakers import WorkerEncodings

# What of the host, and of torch, we replace in workers and engine cores. Platforms and
# families install those that they need.
PATCHES = (
    Patch(
        "vllm_omni.worker.mixins.OmniWorkerMixin",
        "sleep discard wake_up",
        "The encode thread rests while sleep mode has the memory.",
        until="the host has models take part in sleep mode",
    ),
    Patch(
        "vllm_omni.diffusion.worker.diffusion_worker.DiffusionWorker",
        "sleep discard wake_up",
        "The same for diffusion workers, which share no class with the others.",
        until="the host has models take part in sleep mode",
    ),
    Patch(
        "vllm_omni.engine.arg_utils",
        "register_omni_models_to_vllm",
        "The host registers its own classes again when it makes a configuration.",
        until="the host leaves classes alone that a plugin has registered",
    ),
    Patch(
        "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
        "_update_request_with_output",
        "A request without its speaker prompt ends alone, as an error with its reason.",
        until="`preprocess` may refuse a request without ending the engine",
    ),
    Patch(
        "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
        "__init__",
        "A preempted request of a family that cannot resume would speak noise.",
        until="the host replays what a preempted request has spoken",
    ),
    Patch(
        "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
        "_free_request_blocks",
        "The KV of a deleted voice is found by its hash until it is evicted.",
        until="vLLM evicts blocks by their cache salt",
    ),
    Patch(
        "vllm.v1.engine.core.EngineCore",
        "collective_rpc",
        "The same: a deletion reaches the engine core as a call of its workers.",
        until="vLLM evicts blocks by their cache salt",
    ),
    Patch(
        "torch.cuda.graph",
        "__init__",
        "Some models capture graphs while they serve, and an encode would spoil one.",
        until="the host captures with `capture_error_mode='thread_local'`",
    ),
    Patch(
        "vllm.model_executor.layers.utils",
        "check_cpu_sgl_kernel",
        "With oneDNN kept from AMX, the multiplication that vLLM takes aborts.",
        until="vLLM asks oneDNN for its limit",
    ),
    Patch(
        "torch.accelerator",
        "empty_cache",
        "It raises where there is no accelerator, and models of the host call it.",
        until="the host asks its platform",
    ),
    Patch(
        "torch.cuda",
        "is_current_stream_capturing",
        "It raises in a build without CUDA, and Higgs Audio's decoder calls it.",
        until="the host asks its platform",
    ),
    Patch(
        "vllm_omni.diffusion.worker.diffusion_worker.WorkerProc",
        "_async_output_loop",
        "The host's makes a stream of the accelerator, and dies without one.",
        until="the host asks its platform",
    ),
    Patch(
        "vllm_omni.diffusion.attention.backends.sdpa.SDPAImpl",
        "forward",
        "The host's refuses a CPU.",
        until="the host's attention runs on platforms that it does not ship",
    ),
    Patch(
        "vllm_omni.model_executor.models.fish_speech.fish_speech_slow_ar",
        "_load_dac_codec",
        "While the model loads, the host would load an encoder of 800 MB beside ours.",
        until="the host loads its encoder when it first encodes",
    ),
    Patch(
        "vllm_omni.model_executor.models.omnivoice.omnivoice_generator",
        "_TRITON_AVAILABLE",
        "The host takes Triton wherever it can be imported, on a CPU as well.",
        until="the host asks for the device too",
    ),
)


# Attributes of a model. Workers of every stage and of every model carry our methods.
SPEAKERS, STATES = "tts_cache_speakers", "tts_cache_decoder_states"


def _model(worker: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    # A diffusion worker's runner has a `pipeline` instead; none has both.
    return getattr(runner, "model", getattr(runner, "pipeline", None))


def _method(
    name: str, side_name: str, answer: Callable[..., Any] | str, kind: Any = None
) -> Callable[..., bytes]:
    """Make a worker's method of a function of ``(side, call, rank)``.

    Args:
        name: The method's.
        side_name: The attribute of a model with speakers, or with a decoder's states.
        answer: Returns the struct to answer with; or the name of the side's that does.
        kind: Of the struct that is its ``call``; None if it takes none.
    """

    def method(self: Any, *data: bytes) -> bytes:
        model = _model(self)
        if (side := getattr(model, side_name, None)) is None:
            reason = getattr(model, "tts_cache_refusal", None)
            reason = reason or f"{type(model).__name__} clones no voices"
            return wire.encode(wire.Unsupported(reason=reason))
        side.num_calls[name] += 1
        try:
            call = [msgspec.msgpack.decode(each, type=kind) for each in data]
            act = answer if callable(answer) else getattr(type(side), answer)
            return wire.encode(act(side, *call, int(self.rank)))
        except Exception as exc:  # noqa: BLE001
            return wire.encode(wire.Failed(reason=str(exc) or repr(exc)))

    method.__name__ = name
    return method


def _delete(
    side: "WorkerEncodings | DecoderStates", call: wire.DeleteCall, _rank: int
) -> wire.Deleted:
    """Delete audios from memory, queue and copies on disk, or a decoder's states."""
    return side.delete_all() if call.everything else side.delete(call.audio_sha256s)


def _stats(speakers: "WorkerEncodings", rank: int) -> wire.WorkerStats:
    """Return counters and sizes, without reading the disk."""
    return wire.WorkerStats(
        rank=rank,
        stats=speakers.stats(),
        worker_id=speakers.worker_id,
        encode_times=speakers.encode_times(),
    )


METHODS = (
    _method("tts_cache_describe", SPEAKERS, "describe", wire.DescribeCall),
    _method(
        "tts_cache_want",
        SPEAKERS,
        lambda its, call, rank: its.queue.want(call, rank),
        wire.WantCall,
    ),
    _method("tts_cache_encoding", SPEAKERS, "encoding", wire.EncodingCall),
    _method("tts_cache_delete", SPEAKERS, _delete, wire.DeleteCall),
    _method(
        "tts_cache_failed",
        SPEAKERS,
        lambda its, call, _: wire.FailedPrompts(causes=its.failed(call.request_ids)),
        wire.FailedCall,
    ),
    _method("tts_cache_stats", SPEAKERS, _stats),
    _method("tts_cache_delete_states", STATES, _delete, wire.DeleteCall),
    _method("tts_cache_decoder_stats", STATES, "stats"),
)


def install() -> None:
    """Add the RPC methods to every LLM worker, and wrap its sleep and wake-up."""
    from vllm_omni.worker.mixins import OmniWorkerMixin

    # Every such worker inherits this mixin, so neither a deploy file nor the user's
    # own --worker-extension-cls has to name us.
    _install_on(OmniWorkerMixin)


def install_on_diffusion() -> None:
    """Do the same for the host's diffusion workers, which have no mixin.

    Called where one of our pipelines is built: other processes do not import them.
    """
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

    _install_on(DiffusionWorker)


def _install_on(workers: Any) -> None:
    """Add the methods to a class of the host's.

    Args:
        workers: Our ``sleep`` and its like call those that the class itself has, or
            else those of the next class that has them.
    """
    sleep, discard = _resting(workers, "sleep"), _resting(workers, "discard")
    host = _hosts(workers, "wake_up")

    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        """Wake up as the host does; encodes go on once all memory is back."""
        answer = host(self)(tags)
        speakers: WorkerEncodings | None = getattr(_model(self), SPEAKERS, None)
        # Weights may be woken alone, to be loaded anew; the rest is woken after them.
        if speakers is not None and (tags is None or "kv_cache" in tags):
            speakers.wake_up()
        return answer

    for method in METHODS:
        patch_once(workers, method.__name__, lambda _, ours=method: ours)
    patch_once(workers, "sleep", lambda _: sleep)
    patch_once(workers, "discard", lambda _: discard)
    patch_once(workers, "wake_up", lambda _: wake_up)


def _resting(workers: Any, name: str) -> Callable[..., Any]:
    host = _hosts(workers, name)

    def rest(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Give memory away as the host does, once no encode runs.

        The host does not free a decoder's states of voices, so they are deleted.
        """
        states: DecoderStates | None = getattr(_model(self), STATES, None)
        if states is not None:
            states.delete_all_for_now()
        speakers: WorkerEncodings | None = getattr(_model(self), SPEAKERS, None)
        if speakers is None:
            return host(self)(*args, **kwargs)
        speakers.sleep()
        try:
            return host(self)(*args, **kwargs)
        except BaseException:
            speakers.wake_up()
            raise

    return rest


def _hosts(workers: Any, name: str) -> Callable[[Any], Callable[..., Any]]:
    own = vars(workers).get(name)
    if own is not None:
        return own.__get__
    return lambda worker: getattr(super(workers, worker), name)


def replace_models() -> None:
    """Register our models over the host's, also after it registers its own again."""
    for family in families():
        for architecture, ours in (*family.models.items(), *family.decoders.items()):
            OmniModelRegistry.register_model(architecture, ours)
        for architecture, ours in family.pipelines.items():
            module, _, name = ours.partition(":")
            register_diffusion_model(architecture, module, name)
    patch_once(
        arg_utils, "register_omni_models_to_vllm", lambda _: register_models_to_vllm
    )


def register_models_to_vllm() -> None:
    """Register the host's classes in vLLM's own registry, and ours after them.

    vLLM's configuration, of which the host makes its own, asks there whether a model
    takes multimodal prompts. If one does, it also takes the class from there.
    """
    register_omni_models_to_vllm()
    for family in families():
        if family.host_is_multimodal:
            for architecture, ours in family.models.items():
                ModelRegistry.register_model(architecture, ours)
