"""What requests have spoken so far, which the host keeps by their rows of the batch.

When a request ends, the last one moves into its row. The host sees no more of that than
how many ids a row has, and mostly not even that: the newcomer goes on where the one
before it ended.
"""

from collections.abc import Collection, Sequence
from typing import Any

# Of one request: its frames, and how far their delays have come. The host's.
State = dict[str, Any]


class SpokenStates:
    """The host's states, by request."""

    def __init__(self) -> None:
        self._of_requests: dict[str, State] = {}
        self._requests_of_rows: list[str | None] = []

    def move(
        self, of_rows: dict[int, State], request_ids: Sequence[str]
    ) -> dict[int, State]:
        """Return the states by the rows of the step that begins.

        Args:
            of_rows: As the step before has left them, by its rows.
            request_ids: Whose the rows are now.
        """
        for row, request_id in enumerate(self._requests_of_rows):
            if request_id is not None and row in of_rows:
                self._of_requests[request_id] = of_rows[row]
        self._requests_of_rows = list(request_ids)
        return {
            row: self._of_requests[request_id]
            for row, request_id in enumerate(request_ids)
            if request_id in self._of_requests
        }

    def delete(self, request_ids: Collection[str]) -> None:
        """Delete what requests have spoken that are over."""
        for request_id in request_ids:
            self._of_requests.pop(request_id, None)
        self._requests_of_rows = [
            None if request_id in request_ids else request_id
            for request_id in self._requests_of_rows
        ]
