"""Limits of this process, as a full disk or a busy machine has them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """Lower a limit of `resource` for a while."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)
