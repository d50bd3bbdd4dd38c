"""``vllm serve`` with a probe in its API process; how `warm_hit` looks inside.

``python -m benchmarks.probe_server serve ...`` takes the arguments of ``vllm serve``.
The probe measures one request at a time, and only while its file exists (its path is
in ``BENCHMARK_PROBE_FILE``): it appends a line of JSON per request, see `Sight`.
"""

import asyncio
import functools
import json
import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TICK_SECONDS = 0.001
GIVE_UP_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class Sight:
    """What is seen of one request.

    Attributes:
        prepare_ms: From the request's validation to the call of the engine.
        cpu_ms: CPU time of the whole API process meanwhile.
        stall_ms: The most that a ticker of 1 ms on the event loop came late, until
            the request was handed to the engine.
        engine_bytes: Size of the message that went to stage 0; of a diffusion model, of
            the prompt as it goes to the worker.
    """

    began: float = field(default_factory=time.perf_counter)
    prepare_ms: float = 0.0
    cpu_ms: float = 0.0
    stall_ms: float = 0.0
    engine_bytes: int | None = None

    async def tick_until_sent(self, path: Path) -> None:
        """Run the ticker, then write the line."""
        last = self.began
        while self.engine_bytes is None and last < self.began + GIVE_UP_SECONDS:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.stall_ms = max(self.stall_ms, 1e3 * (now - last - TICK_SECONDS))
            last = now
        shown = {name: getattr(self, name) for name in _SHOWN}
        with path.open("a") as file:
            file.write(json.dumps(shown) + "\n")

    def prepared(self, cpu_began: float) -> None:
        """Take note that the engine is called now."""
        self.cpu_ms = 1e3 * (time.process_time() - cpu_began)
        self.prepare_ms = 1e3 * (time.perf_counter() - self.began)


_SHOWN = ("prepare_ms", "cpu_ms", "stall_ms", "engine_bytes")


class Probe:
    """Wraps the two calls that it measures between."""

    def __init__(self, path: Path):
        self._path = path
        self._sight: Sight | None = None
        self._cpu_began = 0.0
        self._ticker: asyncio.Task[None] | None = None  # the loop keeps it weakly

    def install(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder
        from vllm_omni.entrypoints.async_omni import AsyncOmni
        from vllm_omni.entrypoints.openai import serving_speech

        serving = serving_speech.OmniOpenAIServingSpeech
        construct, encode = serving.__init__, MsgpackEncoder.encode
        for_diffusion, generate = serving.for_diffusion.__func__, AsyncOmni.generate

        @functools.wraps(construct)
        def constructed(server: Any, *args: Any, **kwargs: Any) -> None:
            construct(server, *args, **kwargs)
            # On the instance: whichever class is served, the outermost call counts.
            prepare = server._prepare_speech_generation
            server._prepare_speech_generation = self._timed(prepare)

        @functools.wraps(encode)
        def counted(encoder: Any, message: Any) -> Any:
            buffers = encode(encoder, message)
            self._see_message(message, buffers)
            return buffers

        @functools.wraps(for_diffusion)
        def diffusing(kind: Any, *args: Any, **kwargs: Any) -> Any:
            server = for_diffusion(kind, *args, **kwargs)
            speak = server._create_diffusion_speech
            server._create_diffusion_speech = self._begun(speak)
            return server

        @functools.wraps(generate)
        def submitted(engine: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            self._see_prompt(engine, prompt)
            return generate(engine, prompt, *args, **kwargs)

        serving.__init__ = constructed
        MsgpackEncoder.encode = counted
        serving.for_diffusion = classmethod(diffusing)
        AsyncOmni.generate = submitted

    def _timed(self, prepare: Any) -> Any:
        @functools.wraps(prepare)
        async def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._path.exists():
                return await prepare(*args, **kwargs)
            sight, cpu_began = self._begin()
            result = await prepare(*args, **kwargs)
            sight.prepared(cpu_began)
            return result

        return timed

    def _begun(self, speak: Any) -> Any:
        """A diffusion model's, which prepares and submits in one."""

        @functools.wraps(speak)
        async def begun(*args: Any, **kwargs: Any) -> Any:
            if self._path.exists():
                _, self._cpu_began = self._begin()
            return await speak(*args, **kwargs)

        return begun

    def _begin(self) -> tuple[Sight, float]:
        sight = self._sight = Sight()
        self._ticker = asyncio.create_task(sight.tick_until_sent(self._path))
        return sight, time.process_time()

    def _see_prompt(self, engine: Any, prompt: Any) -> None:
        is_diffusion = engine.engine.stage_configs[0].stage_type == "diffusion"
        if self._sight is None or not is_diffusion:
            return
        self._sight.prepared(self._cpu_began)
        self._sight.engine_bytes = len(pickle.dumps(prompt))
        self._sight = None

    def _see_message(self, message: Any, buffers: Any) -> None:
        is_request = getattr(message, "prompt_token_ids", None) is not None
        if self._sight is None or not is_request:
            return
        if getattr(message, "additional_information", None) is None:
            return
        self._sight.engine_bytes = sum(memoryview(part).nbytes for part in buffers)
        self._sight = None  # what goes to the later stages is not measured


def main() -> None:
    from vllm_omni.entrypoints.cli.main import main as serve

    Probe(Path(os.environ["BENCHMARK_PROBE_FILE"])).install()
    serve()


if __name__ == "__main__":
    main()
