"""How a server ends: it takes nothing new, and leaves nobody waiting.

vLLM-Omni 0.30 stops its engine first, and then its HTTP server waits for every request.
It is heard until the engine is gone, so requests are taken that must fail. Those that
were under way wait for ever for an engine that says nothing more, so the server does
not end, and a fleet waits for it. Ours closes the door first, goes on with what it has
for a while, and ends what is left together with the engine.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_omni.engine.messages import ErrorMessage

logger = logging.getLogger("vllm.vllm_tts_cache")

LOOK_SECONDS = 0.05
# The host kills API processes, of which there are several, after 5 seconds.
SHARED_SECONDS = 2.0
Serve = Callable[..., Coroutine[Any, Any, Any]]


def stopping_well(serve_http: Serve, drain_seconds: float) -> Serve:
    """The host's ``serve_http``, of a server that ends so.

    Args:
        serve_http: Serves an application until a signal, or until its engine has died.
        drain_seconds: For what is under way when the signal comes.
    """

    async def serve(app: Any, *args: Any, **options: Any) -> Any:
        Stop(app.state, asyncio.get_running_loop(), drain_seconds).expect()
        # The host would shut it down by the application's state, which is deleted then.
        speech = app.state.openai_serving_speech
        last_part = await serve_http(app, *args, **options)
        return _shut_down_after(last_part, speech)

    return serve


async def _shut_down_after(last_part: Coroutine[Any, Any, None], speech: Any) -> None:
    try:
        await last_part
    finally:
        if speech is not None:
            speech.shutdown()


class Stop:
    """The end of one API process.

    Args:
        state: Of its application, in which the host keeps its engine and its server.
        loop: That it runs on.
        drain_seconds: For what is under way.
    """

    def __init__(
        self, state: Any, loop: asyncio.AbstractEventLoop, drain_seconds: float
    ):
        self._state = state
        self._loop = loop
        is_shared = (getattr(state.args, "api_server_count", None) or 1) > 1
        self._seconds = (
            min(drain_seconds, SHARED_SECONDS) if is_shared else drain_seconds
        )
        self._is_over = threading.Event()

    def expect(self) -> None:
        """Take part in what the host does once it is told to stop."""
        engine = self._state.engine_client
        host = engine.shutdown

        def shutdown(timeout: float | None = None) -> None:
            if _is_on_a_loop():  # the server has ended by itself
                return host(timeout=timeout)
            self._drain()
            try:
                host(timeout=timeout)
            finally:
                self._loop.call_soon_threadsafe(self._end_requests)

        engine.shutdown = shutdown

    def _drain(self) -> None:
        """Take nothing new, and wait for what is under way."""
        asyncio.run_coroutine_threadsafe(self._close_the_door(), self._loop).result()
        looks = int(self._seconds / LOOK_SECONDS)
        while self._num_requests and looks > 0 and not self._is_over.is_set():
            self._is_over.wait(LOOK_SECONDS)
            looks -= 1
        if num := self._num_requests:
            logger.warning(
                "Stopping: cutting %d requests off; SPEAKER_DRAIN_SECONDS is how long "
                "they may take.",
                num,
            )

    @property
    def _num_requests(self) -> int:
        return len(self._state.server.server_state.tasks)

    async def _close_the_door(self) -> None:
        server = self._state.server
        for listening in getattr(server, "servers", ()):  # none before it has started
            listening.close()
        for connection in list(server.server_state.connections):
            # An idle one is closed; another one once it is answered. WebSockets, which
            # have no such cycle, would be cut off.
            if hasattr(connection, "cycle"):
                connection.shutdown()
        if self._num_requests:
            logger.info(
                "Stopping: %d requests have %g seconds; Ctrl-C once more ends them.",
                self._num_requests,
                self._seconds,
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._is_over.set)

    def _end_requests(self) -> None:
        for request in list(self._state.engine_client.request_states.values()):
            request.queue.put_nowait(
                ErrorMessage(
                    error="the server was stopped",
                    fatal=True,
                    request_id=request.request_id,
                )
            )


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
