"""The host's real speech server in this process, with ours in it, but for its engine.

Routes, serving class, adapters and tokenizer are real, and so are our workers; the
engine only prefills: it looks for the speaker prompt as a talker does, and speaks
silence.
"""

import asyncio
import socket
import uuid
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import APIRouter, FastAPI

from tests.families.cases import case_of, default_case
from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    worker_speakers,
    worker_with,
)
from tests.waiting import settled
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints import metrics
from vllm_tts_cache.entrypoints.serving.host_fixes import BoundedHeads
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.model_executor.decoder_states import DecoderStates
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

_INCLUDED: dict[tuple[int, ...], FastAPI] = {}


class PrefillEngine(InProcessEngine):
    """Stands for the host's engine client.

    ``before_prefill`` holds functions that are called before prefills, one each.
    """

    def __init__(self, checkpoint, *speakers, stage=None, family=None, **config):
        from vllm import SamplingParams

        self.case = case_of(family) if family else default_case()
        stage = stage or self.case.stage["model_stage"]
        super().__init__(*(worker_with(each) for each in speakers))
        if self.case.family.decoders:
            for each in self.workers:  # which are of its second stage as well
                model = each.model_runner.model
                model.tts_cache_decoder_states = DecoderStates(max_bytes=0)
        self.speakers = speakers
        self.renderer = self.input_processor = None
        # One of two processes: it sends no requests that nobody made.
        self.engine = SimpleNamespace(
            stage_vllm_configs=[None], _client_config={"client_count": 2}
        )
        self.tts_batch_max_items = 32
        self.default_sampling_params_list = [SamplingParams(max_tokens=50)] * 2
        hf_config = self.case.hf_config(checkpoint)
        for name, value in config.items():
            setattr(hf_config, name, value)
        self.model_config = SimpleNamespace(
            model=str(checkpoint),
            hf_config=hf_config,
            revision=None,
            allowed_local_media_path="",
            allowed_media_domains=None,
            async_chunk=True,
        )
        engine_args = SimpleNamespace(
            model=str(checkpoint), model_stage=stage, model_arch="", worker_type="ar"
        )
        self.stage_configs = [SimpleNamespace(engine_args=engine_args)]
        self.before_prefill = []
        self.prompts = []

    async def generate(self, *, prompt, request_id, **_):
        self.prompts.append({**prompt})
        internal_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        await asyncio.sleep(0)
        if self.before_prefill:
            self.before_prefill.pop(0)()
        try:
            self._prefill(self._info(prompt))
        except TTSCacheError as exc:
            # A diffusion model is told what the API process calls the request.
            failed = prompt.get(REQUEST_FIELD, internal_id)
            for each in self.speakers:
                each.remember_failed_prompt(failed, str(exc))
            raise self.error("the request ended as an error") from exc
        for _ in range(2):
            yield SimpleNamespace(
                multimodal_output={"audio": torch.zeros(2_400), "sr": 24_000},
                final_output_type="audio",
                metrics={},
                outputs=[],
            )

    @property
    def error(self) -> type[Exception]:
        """What the host raises of a request that the engine has ended."""
        from vllm.v1.engine.exceptions import EngineGenerateError

        return EngineGenerateError

    def _info(self, prompt):
        return prompt.get("additional_information", {})

    def _prefill(self, info):
        if FIELD in info:
            for each in self.speakers:
                each.prompt(each.named_by(info), self.case.mode_of(info).encoders)

    async def abort(self, request_id):
        pass


class DiffusionEngine(PrefillEngine):
    """The same of a diffusion model, which has no configuration of a language model."""

    def __init__(self, checkpoint, *speakers, family, **config):
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        super().__init__(checkpoint, *speakers, family=family, **config)
        self.model, self.model_config = str(checkpoint), None
        self.default_sampling_params_list = [OmniDiffusionSamplingParams()]
        self.architecture = self.case.stage["model_arch"]
        self.params = []

    @property
    def error(self):
        return RuntimeError

    def get_diffusion_od_config(self):
        return SimpleNamespace(model_class_name=self.architecture)

    async def generate(self, *, prompt, request_id, sampling_params_list, **_):
        self.params.append(sampling_params_list[0])
        async for output in super().generate(prompt=prompt, request_id=request_id):
            yield output

    def _info(self, prompt):
        return prompt


class Server:
    """One API process, its workers, and a client of it."""

    def __init__(self, checkpoint, directory, monkeypatch, encoders=None, **config):
        monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(directory))
        # Tests count calls of workers, and are not to meet those of the metrics.
        monkeypatch.setattr(metrics, "PERIOD_SECONDS", 3600.0)
        self.directory = directory
        family = config.get("family") or default_case().family
        self.encoders = encoders or [SpectrumEncoder(n) for n in family.encoders]
        # Of one environment with the API process, as everywhere.
        line = load_settings().max_waiting_inline
        self.speakers = worker_speakers(
            directory, self.encoders, max_waiting_inline=line
        )
        engine = DiffusionEngine if family.pipelines else PrefillEngine
        self.engine = engine(checkpoint, self.speakers, **config)
        self.app = FastAPI()
        self.handler: Any = None

    def start(self):
        from vllm.entrypoints.serve.exception_handling.register import (
            init_exception_handler,
        )
        from vllm_omni.entrypoints.openai import api_server
        from vllm_omni.entrypoints.serve.utils.errors import (
            _register_omni_exception_handlers,
        )

        from vllm_tts_cache.entrypoints.attach import attach

        attach()
        serving = api_server.OmniOpenAIServingSpeech
        if isinstance(self.engine, DiffusionEngine):
            self.handler = serving.for_diffusion(self.engine, "m")
        else:
            models = SimpleNamespace(is_base_model=lambda name: True, lora_requests={})
            self.handler = serving(self.engine, models, request_logger=None)
        self.app.router.routes.extend(_included(api_server.router.routes))
        init_exception_handler(self.app)
        _register_omni_exception_handlers(self.app)
        state = self.app.state
        state.args = SimpleNamespace(log_error_stack=False)
        state.engine_client, state.server = self.engine, None
        state.openai_serving_speech = self.handler
        if not isinstance(self.engine, DiffusionEngine):  # as the host's server
            state.openai_streaming_speech = api_server.OmniStreamingSpeechHandler(
                speech_service=self.handler
            )
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=60
        )

    @property
    def service(self):
        return self.handler.speakers

    @property
    def encodes(self):
        return self.speakers.stats().encodes

    async def register(self, name, audio, **fields):
        return await self.client.post(
            "/v1/audio/voices",
            data={"name": name, "consent": "yes", "precompute": "false", **fields},
            files={"audio_sample": ("clip.wav", audio, "audio/wav")},
        )

    @property
    def embedding_dim(self):
        """Of the default family's talker."""
        config: Any = self.engine.model_config
        return config.hf_config.talker_config.hidden_size

    async def embed(self, name, value=0.5, **fields):
        """Register an embedding in the place of a clip."""
        values = str([value] * self.embedding_dim)
        form = {"name": name, "consent": "y", "speaker_embedding": values, **fields}
        return await self.client.post("/v1/audio/voices", data=form)

    async def speak(self, **fields):
        return await self.client.post(
            "/v1/audio/speech", json={"input": "Hello.", "model": "m", **fields}
        )

    async def settled(self):
        """What was started in the background is over."""
        await settled(self.service.encodings)


def _included(routes):
    """What an application makes of its router's routes, which takes FastAPI long."""
    found = _INCLUDED.setdefault(tuple(map(id, routes)), FastAPI(openapi_url=None))
    if not found.routes:
        found.include_router(APIRouter(routes=list(routes)))
    return found.routes


@asynccontextmanager
async def running(server):
    server.start()
    try:
        yield server
    finally:
        for encoder in server.encoders:
            encoder.gate.set()
        await server.settled()
        await server.client.aclose()
        connection = server.handler.fetch_connection
        await (await connection.get_async_client()).close()
        server.handler.shutdown()
        server.speakers.close()


class WebServer(uvicorn.Server):
    """Leaves the signals to whoever runs the tests."""

    @contextmanager
    def capture_signals(self):
        yield


@asynccontextmanager
async def listening(app):
    """A real web server in front of it, as the host starts it; gives its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        options: Any = {"lifespan": "off", "log_config": None, "access_log": False}
        options |= {"http": BoundedHeads, "timeout_graceful_shutdown": 5}
        web = WebServer(uvicorn.Config(app, **options))
        serving = asyncio.create_task(web.serve([listener]))
        while not web.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            web.should_exit = True
            await serving
