"""vLLM's allocator of sleep mode, of which a CPU has none."""


class Allocator:
    """``calls`` has what it was asked for; ``error`` is raised instead of a sleep."""

    def __init__(self):
        self.calls = []
        self.error: Exception | None = None

    def get_current_usage(self):
        return 0

    def sleep(self, offload_tags):
        if self.error is not None:
            raise self.error
        self.calls.append(("sleep", offload_tags))

    def discard(self, tags):
        self.calls.append(("discard", tags))

    def wake_up(self, tags):
        self.calls.append(("wake_up", tags))

    @property
    def asked(self):
        return [name for name, _ in self.calls]
