"""The host's networks where vLLM is not installed, or not built for this machine.

Reference encoders are plain torch, but some of the host's modules that define one
import vLLM beside it, and vLLM is built for one version of torch and one kind of
device. Here the name `vllm` is given to modules whose contents do nothing, and the
host's packages to their folders, so that none of their `__init__` runs. What an encoder
computes with is the host's own; anything else is of no use then.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# Packages of the host whose `__init__` imports an engine.
_HOST_PACKAGES = (
    "vllm_omni",
    "vllm_omni.model_executor",
    "vllm_omni.model_executor.models",
)


class _Inert(type):
    """A class that can be subclassed, called, indexed and asked for any attribute."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_options: Any
    ) -> "_Inert":
        return super().__new__(cls, name, bases, body)

    def __init__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_options: Any
    ):
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> "type[Any]":
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Give back what a decorator decorates, and of all else a class like this."""
        is_decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorated else _inert(cls.__name__)

    def __bool__(cls) -> bool:
        """Deny that this is any platform's machine."""
        return False

    def __iter__(cls) -> "Iterator[Any]":
        return iter(())

    def __getitem__(cls, _item: Any) -> "type[Any]":
        return cls


def _inert(name: str) -> type[Any]:
    return _Inert(name, (), {})


class _InertModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(name)


class _InertVllm(MetaPathFinder, Loader):
    """Finds every module of `vllm`, and makes it of nothing."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: Any = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""
        del module


def vllm_works() -> bool:
    """Whether vLLM can be imported here, and vLLM-Omni beside it."""
    try:
        for name in ("vllm", "vllm_omni"):
            importlib.import_module(name)
    except Exception:  # noqa: BLE001  a build for another torch raises anything
        return False
    return True


def use_without_vllm() -> None:
    """Make the host's networks importable; call it before the first import of any.

    Raises: ModuleNotFoundError if vLLM-Omni's files are not installed.
    """
    for name in list(sys.modules):  # what an import that failed has left
        if name.partition(".")[0] in ("vllm", "vllm_omni"):
            del sys.modules[name]
    found = importlib.util.find_spec("vllm_omni")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("vllm_omni is not installed: pip install --no-deps")
    folder = Path(found.submodule_search_locations[0]).parent
    for name in _HOST_PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.meta_path.insert(0, _InertVllm())
