"""A LiveKit agent that speaks with a registered voice.

    pip install livekit-agents livekit-plugins-openai
    export LIVEKIT_URL=... LIVEKIT_API_KEY=... LIVEKIT_API_SECRET=... OPENAI_API_KEY=...
    export SPEECH_URL=http://localhost:8091/v1 SPEECH_KEY=none VOICE=keeper
    python examples/livekit_agent.py dev

It hears and thinks by OpenAI, and speaks by `vllm serve MODEL --omni
--served-model-name gpt-4o-mini-tts`.
"""
# pyright: reportMissingImports=false

import os

from livekit import agents
from livekit.plugins import openai


class Keeper(agents.Agent):
    """Greets who calls, and answers."""

    def __init__(self) -> None:
        super().__init__(instructions="You keep a harbour. Answer in a sentence.")

    async def on_enter(self) -> None:
        """Begin to speak."""
        await self.session.generate_reply(instructions="Greet the caller.")


def speech() -> openai.TTS:
    """Return the speech of our server."""
    return openai.TTS(
        base_url=os.environ["SPEECH_URL"],
        api_key=os.environ.get("SPEECH_KEY", "none"),
        model="gpt-4o-mini-tts",
        voice=os.environ["VOICE"],
    )


async def answer(job: agents.JobContext) -> None:
    """Take part in a room."""
    session = agents.AgentSession(stt=openai.STT(), llm=openai.LLM(), tts=speech())
    await session.start(agent=Keeper(), room=job.room)


if __name__ == "__main__":
    agents.cli.run_app(agents.WorkerOptions(entrypoint_fnc=answer))
