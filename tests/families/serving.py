"""A family's API process with stand-ins for its encoders, whose arrays are as long."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.families.cases import Case
from tests.in_process_workers import SpectrumEncoder
from tests.speaking import wav
from tests.speech_server import Server
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Encoding


class StandIn(SpectrumEncoder):
    """Gives ``arrays`` of the audio."""

    def __init__(self, name: str, arrays: Callable[[ReferenceAudio], Mapping]):
        super().__init__(name)
        self._arrays = arrays

    def encode(self, audio: ReferenceAudio) -> Encoding:
        super().encode(audio)
        return Encoding(dict(self._arrays(audio)))


def served(case: Case, *places: Any, **config: Any) -> Server:
    """A server that has not begun; `Case.serve` is to be called when it has."""
    encoders = [StandIn(name, arrays) for name, arrays in case.arrays.items()]
    return Server(*places, encoders=encoders, family=case.family, **config)


async def ann(server: Any, **fields: Any) -> dict[str, Any]:
    """Register Ann; what is told of her."""
    answer = await server.register("Ann", wav(), **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["voice"]


async def anns_prompt(server: Any, text: str, **fields: Any) -> Any:
    """Register Ann and speak: the ids that the engine is told, and her rows in them."""
    await ann(server, **fields)
    assert (await server.speak(voice="Ann", input=text)).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, prompts.ROWS}
    return made["prompt_token_ids"], prompts.ReferenceRows.from_info(told)


def message(answer: Any, status: int = 400) -> str:
    """What a client is told of an error."""
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]
