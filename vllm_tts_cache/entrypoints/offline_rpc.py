"""``Omni.collective_rpc``, which vLLM-Omni 0.30 has on ``AsyncOmni`` only."""

from typing import Any


def install() -> None:
    """Give the synchronous engine the method, unless it has one of its own."""
    from vllm_omni.entrypoints.omni import Omni

    if not hasattr(Omni, "collective_rpc"):
        Omni.collective_rpc = collective_rpc  # pyright: ignore[reportAttributeAccessIssue]


def collective_rpc(
    self: Any,
    method: str,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    stage_ids: list[int] | None = None,
) -> list[Any]:
    """Call ``method`` on every worker of the stages: a list per replica."""
    return self.engine.collective_rpc(
        method, timeout=timeout, args=args, kwargs=kwargs, stage_ids=stage_ids
    )
