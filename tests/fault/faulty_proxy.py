"""Between a client and a server: answers that come late, fall short, or are errors."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWER_500 = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class FaultyProxy:
    """Passes bytes on ``whole``, ``short``, ``late``, or answers by an ``error``.

    Or it is to ``refuse``; in the mode ``any``, one of them for each connection.
    """

    def __init__(self, port: int, seed: int = 0):
        self._mode = "whole"
        self._open: set[socket.socket] = set()
        self.num_faults = 0
        self._chance = random.Random(seed)
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        for client in list(self._open):  # clients keep connections
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        mode = self.mode
        if mode == "any":
            mode = self._chance.choice(["short", "short", "refuse", "error"])
        self.num_faults += mode != "whole"
        self._open.add(client)
        try:
            self._answer(client, mode)
        finally:
            self._open.discard(client)

    def _answer(self, client: socket.socket, mode: str) -> None:
        with client, suppress(OSError):
            if mode == "refuse":
                return
            if mode == "error":
                client.recv(65536)
                client.sendall(ANSWER_500)
                return
            if mode == "late":
                time.sleep(3600)
            with socket.create_connection(self._target) as server:
                threading.Thread(target=_pass, args=(client, server)).start()
                left = self._chance.randrange(200, 30_000) if mode == "short" else None
                _pass(server, client, left)


@contextmanager
def faulty(port: int, seed: int = 0) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port, seed)
    try:
        yield proxy
    finally:
        proxy.close()


def _pass(source: socket.socket, sink: socket.socket, left: int | None = None) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if left is not None:
                data, left = data[:left], max(0, left - len(data))
            sink.sendall(data)
            if left == 0:
                break
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
