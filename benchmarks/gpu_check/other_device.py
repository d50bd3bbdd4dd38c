"""A device that is not there, whose tensors refuse to meet a CPU's as a card's would.

They say that they are on ``cuda:0``, and have their numbers in a CPU's memory: of
torch's own fake tensors no encoder could hand over what it made of a clip, and where
torch is built without CUDA those of a card cannot even be cut.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

THERE, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten: Any = torch.ops.aten
_MOVING = _aten.to, _aten._to_copy, _aten.copy_
_PINNING = _aten.pin_memory, _aten._pin_memory
# An index may be on the CPU, where what it picks from is over there.
_INDEXED = _aten.index, _aten.index_put, _aten.index_put_
# Of a CPU these refuse single numbers, too.
_JOINING = _aten.cat, _aten.stack
# Asked when a module is moved, of its tensor here and there.
_COMPARING = _aten._has_compatible_shallow_copy_type


class Elsewhere(Tensor):
    """A tensor over there; ``here`` has its numbers."""

    here: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @torch.inference_mode(False)  # torch may take one for a view of a weight
    def __new__(cls, here: Tensor) -> Any:
        """Wrap a tensor of the CPU."""
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write; only whole parts can be written from a CPU's tensor."""
        if any(isinstance(each, Tensor) for each in tree_leaves(index)):
            _device_of(_aten.index_put_, [self, value])
        self.here[tree_map(_numbers, index)] = _numbers(value)


def _by_numbers(name: str) -> Callable[..., Any]:
    def method(self: Elsewhere, *args: Any, **kwargs: Any) -> Any:
        made = getattr(self.here, name)(*tree_map(_numbers, args), **kwargs)
        return self if made is self.here else _wrapped(made)

    return method


# For these torch looks for the device, before it hands them over.
for _name in (
    *("__getitem__", "__int__", "__float__", "__index__", "__invert__", "__repr__"),
    *("contiguous", "copy_", "new_tensor", "nonzero", "tolist"),
):
    setattr(Elsewhere, _name, _by_numbers(_name))


class _Intercepted(TorchDispatchMode):
    """Sees also what is made over there, and what is moved to it."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    packet, leaves = func.overloadpacket, tree_leaves((args, kwargs))
    if packet in _PINNING:
        return args[0].clone()
    devices = [each for each in leaves if isinstance(each, torch.device)]
    if packet in _MOVING:
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        devices.append(tensors[0 if packet is _aten.copy_ else -1].device)
    elif not devices and packet is not _COMPARING:
        is_cut = packet in _INDEXED and isinstance(args[0], Elsewhere)
        met = [args[0], *args[2:]] if is_cut else leaves
        devices.append(_device_of(packet, met))
    given = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    args_here, kwargs_here = tree_map(_numbers, (args, given))
    made = func(*args_here, **kwargs_here)
    if devices and devices[0].type == CPU.type:
        is_left = packet in _MOVING and made is not args[0] is not args_here[0]
        return made.clone() if is_left else made
    if packet in _MOVING and made is args[0]:
        made = made.clone()
    known = {id(each.here): each for each in leaves if isinstance(each, Elsewhere)}
    return tree_map(lambda each: known.get(id(each), _wrapped(each)), made)


def _device_of(packet: Any, leaves: list[Any]) -> torch.device:
    """Return where it computes. Raises: RuntimeError: Its tensors are on two."""
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    is_there = any(isinstance(each, Elsewhere) for each in tensors)
    for each in tensors:
        is_free = each.dim() == 0 and packet not in _JOINING
        if is_there and not isinstance(each, Elsewhere) and not is_free:
            raise RuntimeError(f"{packet}: tensors on both {THERE} and {CPU}")
    return THERE if is_there else CPU


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU
    return value.here if isinstance(value, Elsewhere) else value


def _wrapped(value: Any) -> Any:
    return Elsewhere(value) if isinstance(value, Tensor) else value


def move(model: nn.Module) -> None:
    """Move a loaded model, and what it has besides its parameters and buffers."""
    model.to(THERE)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.to(THERE))
            elif isinstance(value, torch.device):
                setattr(module, name, THERE)


@contextmanager
def another_device() -> Iterator[torch.device]:
    """Inside, what is made on ``cuda:0``, or moved to it, is there."""
    # A pause between slices waits for an event.
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    overwrite = torch.__future__.set_overwrite_module_params_on_conversion
    with (
        torch.no_grad(),  # to free a graph over there would end the process
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "Event", lambda **_: event),
    ):
        torch._C._set_only_lift_cpu_tensors(True)
        overwrite(True)
        try:
            with _Intercepted():
                yield THERE
        finally:
            overwrite(False)
            torch._C._set_only_lift_cpu_tensors(False)
