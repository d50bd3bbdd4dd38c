"""Says what a server's processes do, a line of JSON each: a plugin of the server.

Kinds: ``open`` (a file, a directory or a database, by Python's audit events), ``rpc``
(the host's call of its workers) and ``message`` (bytes of a request to stage 0; of a
diffusion model, those of its prompt as they go to the worker).
"""

import functools
import json
import multiprocessing
import os
import pickle
import sys
import threading

VARIABLE = "WARM_REQUEST_PROBE_LOG"
_OPENING = ("open", "os.listdir", "os.scandir", "sqlite3.connect")
_installed = []


def register():
    if _installed:
        return
    _installed.append(True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    log = os.open(os.environ[VARIABLE], flags, 0o600)
    is_api = multiprocessing.parent_process() is None
    process = "api" if is_api else multiprocessing.current_process().name

    def say(kind, what):
        thread = threading.current_thread().name
        line = {"process": process, "thread": thread, "kind": kind, "what": what}
        os.write(log, json.dumps(line).encode() + b"\n")

    sys.addaudithook(functools.partial(_see_opened, say))
    if is_api:
        _see_rpcs(say)
        _see_messages(say)
        _see_prompts(say)


def _see_opened(say, event, arguments):
    if event in _OPENING and not isinstance(arguments[0], int):  # open already
        say("open", os.fsdecode(arguments[0] or "."))


def _see_rpcs(say):
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    call = AsyncOmni.collective_rpc

    @functools.wraps(call)
    async def seen(self, method, *args, **kwargs):
        say("rpc", method)
        return await call(self, method, *args, **kwargs)

    AsyncOmni.collective_rpc = seen


def _see_messages(say):
    from vllm.v1.serial_utils import MsgpackEncoder

    encode = MsgpackEncoder.encode

    @functools.wraps(encode)
    def seen(self, obj):
        buffers = encode(self, obj)
        if getattr(obj, "additional_information", None) is not None:
            parts = (memoryview(part) for part in buffers)  # type: ignore[arg-type]
            say("message", sum(part.nbytes for part in parts))
        return buffers

    MsgpackEncoder.encode = seen


def _see_prompts(say):
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    generate = AsyncOmni.generate

    @functools.wraps(generate)
    def seen(self, prompt, *args, **kwargs):
        if self.engine.stage_configs[0].stage_type == "diffusion":
            say("message", len(pickle.dumps(prompt)))
        return generate(self, prompt, *args, **kwargs)

    AsyncOmni.generate = seen
