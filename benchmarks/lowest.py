"""Runs a command at the lowest priority that there is.

Linux weighs sessions against one another before it looks at the priority of what is in
them (``sched_autogroup``), so ``nice`` alone leaves a command that is started from
another terminal as much of a core as a server with all its threads.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

LOWEST = 19
_SESSION = Path("/proc/self/autogroup")


def command(*given: str) -> list[str]:
    """The command, to be run at the lowest priority; it gets a session of its own."""
    return [sys.executable, str(Path(__file__)), *given]


def main(given: list[str]) -> None:
    """Become the command."""
    with suppress(PermissionError):  # whoever leads a group is in a session of its own
        os.setsid()
    os.nice(LOWEST)
    with suppress(OSError):  # a kernel without
        _SESSION.write_text(str(LOWEST))
    os.execvp(given[0], given)


if __name__ == "__main__":
    main(sys.argv[1:])
