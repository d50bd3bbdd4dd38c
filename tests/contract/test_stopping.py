"""The host's own server, told to stop, shuts our side down; it forgets to by itself."""

import asyncio
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from vllm_tts_cache.entrypoints.serving.host_fixes import stopping_well


@pytest.fixture
async def server(server):
    (engine := server.engine).vllm_config = SimpleNamespace(shutdown_timeout=0)
    engine.request_states, engine.is_running = {}, True
    engine.shutdown = lambda timeout: setattr(engine, "errored", True)
    server.app.state.args.api_server_count = 1
    return server


def participants(server):
    with server.service.store.database.read() as db:
        return db.execute(text("SELECT id FROM participant")).all()


async def test_a_server_that_stops_is_waited_for_no_longer(server, monkeypatch):
    from vllm.entrypoints.launchers.launcher import serve_http

    seen = []
    shut_down = server.handler.shutdown

    def look_and_shut_down():
        seen.append(len(participants(server)))
        server.service.deletions.shutdown()
        seen.append(len(participants(server)))
        shut_down()

    monkeypatch.setattr(server.handler, "shutdown", look_and_shut_down)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(
            stopping_well(serve_http, 0.0)(
                server.app, listener, port=listener.getsockname()[1], lifespan="off"
            )
        )
        while not getattr(getattr(server.app.state, "server", None), "started", False):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await (await asyncio.wait_for(serving, 30))
    assert seen == [1, 0]
    monkeypatch.undo()  # the fixture shuts it down once more
