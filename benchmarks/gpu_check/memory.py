"""How much of a device's memory an encode takes, by the length of its audio."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_check.clips import noise
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.reference import ReferenceEncoder

MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A line through peaks of several lengths.

    Attributes:
        peaks: Bytes at the fullest moment of an encode, weights not counted, by the
            seconds of audio.
    """

    peaks: Mapping[float, int]
    bytes_per_second: float
    fixed_bytes: float

    @classmethod
    def through(cls, peaks: Mapping[float, int]) -> "Need":
        """The line of least squares; of two lengths, the one through both.

        Raises: ValueError if there are not two.
        """
        if len(peaks) < 2:
            raise ValueError("a line takes two lengths")
        slope, start = np.polyfit(list(peaks), list(peaks.values()), 1)
        return cls(
            peaks=dict(peaks), bytes_per_second=float(slope), fixed_bytes=float(start)
        )


def measure_need(
    encoder: ReferenceEncoder, device: torch.device, lengths: Iterable[float]
) -> Need:
    """Encode a clip of each length, which compute on ``device``."""
    peaks = {}
    for seconds in lengths:
        clip = noise(seconds)
        peaks[seconds] = peak_bytes(device, lambda clip=clip: encoder.encode(clip))
    return Need.through(peaks)


def peak_bytes(device: torch.device, run: Callable[[], Any]) -> int:
    """The most that tensors made by ``run`` take at a time, in bytes.

    On a GPU as its allocator counts it, workspaces included; on a CPU, tensors alone.
    """
    if device.type != "cuda":
        with TensorBytes() as counted:
            run()
        return counted.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def filled(device: torch.device, *, but_for: int) -> Iterator[None]:
    """Leave so many bytes of a GPU inside."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    ballast = torch.empty(free - but_for, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()


def refusal(encode: Callable[[], Any]) -> str:
    """What an encode that fails says; empty if it does not."""
    try:
        encode()
    except EncodeError as exc:
        return str(exc)
    return ""


class TensorBytes(TorchDispatchMode):
    """Counts the storages that are made inside it and still there.

    Attributes:
        now: Bytes.
        peak: The most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch; one made of others part by part, to see those."""
        kwargs = kwargs or {}
        # Storages that came in are not made here.
        given = {_storage(t)._cdata for t in _tensors((args, kwargs))}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage._cdata not in given:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self._seen.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._delete, address, num_bytes)

    def _delete(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.now -= num_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
