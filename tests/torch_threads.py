"""How many threads torch computes on."""

from contextlib import contextmanager

import torch


@contextmanager
def on_threads(num):
    """So many inside; the encode thread has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
