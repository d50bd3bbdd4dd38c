# pyright: reportMissingImports=false
"""Speaks by the code of a client's own package, in `.venv-clients`.

usage: speak_by_client.py CLIENT BASE_URL MODEL VOICE

It prints the number of samples, their rate, and the seconds until the first of them.
"""

import asyncio
import io
import json
import os
import runpy
import sys
import time
from pathlib import Path

TEXT = "The keeper counts the ships at dusk."


def decoded(data):
    import av

    with av.open(io.BytesIO(data), "r") as container:
        num_samples = sum(frame.samples for frame in container.decode(audio=0))
        return num_samples, container.streams.audio[0].rate


async def agent(base_url, model, voice):
    """As the agent of our examples."""
    del model
    os.environ |= {"SPEECH_URL": base_url, "VOICE": voice}
    path = Path(__file__).parents[2] / "examples/livekit_agent.py"
    return await _of_livekit(runpy.run_path(str(path))["speech"])


async def livekit(base_url, model, voice):
    """As an agent does that names its voice, and nothing else."""
    from livekit.plugins import openai

    said = {"base_url": base_url, "api_key": "none", "model": model, "voice": voice}
    return await _of_livekit(lambda: openai.TTS(**said))


async def _of_livekit(make):
    from livekit.agents import utils

    async with utils.http_context.open():
        speaker = make()
        num_samples, rate_hz = 0, 0
        async for event in speaker.synthesize(TEXT):
            num_samples += event.frame.samples_per_channel
            rate_hz = event.frame.sample_rate
        await speaker.aclose()
    return num_samples, rate_hz


async def pipecat(base_url, model, voice):
    """As its pipeline calls the service; it reads PCM as 24 kHz."""
    from pipecat.services.openai.tts import OpenAITTSService

    named = OpenAITTSService.Settings(model=model, voice=voice)
    service = OpenAITTSService(api_key="none", base_url=base_url, settings=named)
    service._sample_rate = 24_000  # which a pipeline's start sets
    num_samples = 0
    async for frame in service.run_tts(TEXT, "context"):
        if not hasattr(frame, "audio"):
            raise SystemExit(str(frame))
        num_samples += len(frame.audio) // 2
    return num_samples, 24_000


def litellm(base_url, model, voice):
    """As a proxy passes a request on."""
    import litellm as package

    asked = {"voice": voice, "input": TEXT, "response_format": "mp3"}
    where = {"api_base": base_url, "api_key": "none"}
    answer = package.speech(model=f"openai/{model}", **asked, **where)
    return decoded(answer.content)


def dify(base_url, model, voice):
    """As its provider of OpenAI-compatible models, credentials checked first."""
    from dify_plugin.interfaces.model.openai_compatible.tts import (
        OAICompatText2SpeechModel,
    )

    class Model(OAICompatText2SpeechModel):
        pass

    credentials = {"endpoint_url": base_url, "voices": voice, "api_key": "none"}
    speaker = Model([])
    speaker.validate_credentials(model, credentials)
    pieces = speaker._invoke(model, "tenant", credentials, TEXT, voice)
    return decoded(b"".join(pieces))


CLIENTS = {"livekit": livekit, "agent": agent, "pipecat": pipecat}
CLIENTS |= {"litellm": litellm, "dify": dify}

if __name__ == "__main__":
    _, client, *told = sys.argv
    begun = time.monotonic()
    found = CLIENTS[client](*told)
    samples, rate = asyncio.run(found) if asyncio.iscoroutine(found) else found
    seconds = time.monotonic() - begun
    sys.stdout.write(json.dumps({"samples": samples, "rate": rate, "seconds": seconds}))
