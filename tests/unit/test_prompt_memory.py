import asyncio
from dataclasses import dataclass

import pytest

from vllm_tts_cache.entrypoints.speakers.service import _ENTRY_BYTES, PromptMemory
from vllm_tts_cache.errors import EncodeError


@dataclass(frozen=True)
class Part:
    text: str
    num_bytes: int = 10


class Building:
    """Counts what is built; close ``gate`` to hold it."""

    def __init__(self):
        self.built = []
        self.gate = asyncio.Event()
        self.gate.set()

    def of(self, text, num_bytes=10):
        async def build():
            self.built.append(text)
            await self.gate.wait()
            return Part(text, num_bytes)

        return build


def room(num_bytes):
    """For four entries, and so many bytes of parts."""
    return 4 * _ENTRY_BYTES + num_bytes


@pytest.fixture
def building():
    return Building()


async def test_the_least_recently_used_part_goes_first(building):
    memory = PromptMemory(2 * _ENTRY_BYTES + 25)
    for salt in ("s", "t", "s", "u", "s"):
        await memory.get_or_build(salt, "a", building.of(salt))
    assert building.built == ["s", "t", "u"]
    await memory.get_or_build("t", "a", building.of("t"))
    assert building.built == ["s", "t", "u", "t"]


async def test_deleting_an_audio_takes_all_its_parts_and_no_others(building):
    memory = PromptMemory(room(100))
    for salt, audio in (("s", "a"), ("t", "a"), ("u", "b")):
        await memory.get_or_build(salt, audio, building.of(salt))
    memory.delete("a")
    assert memory._parts.currsize == _ENTRY_BYTES + 10
    for salt, audio in (("s", "a"), ("t", "a"), ("u", "b")):
        await memory.get_or_build(salt, audio, building.of(salt))
    assert building.built == ["s", "t", "u", "s", "t"]


async def test_what_is_deleted_while_it_is_built_is_not_kept(building):
    memory = PromptMemory(room(100))
    building.gate.clear()
    asked = asyncio.create_task(memory.get_or_build("s", "a", building.of("x")))
    await asyncio.sleep(0)
    memory.delete("a")
    building.gate.set()
    assert await asked == Part("x")
    assert memory._parts.currsize == 0


async def test_a_build_that_fails_leaves_nothing(building):
    memory = PromptMemory(room(100))

    async def fail():
        raise EncodeError("no")

    with pytest.raises(EncodeError):
        await memory.get_or_build("s", "a", fail)
    assert await memory.get_or_build("s", "a", building.of("x")) == Part("x")


async def test_a_thousand_short_voices_take_no_more_than_the_budget_says(building):
    """An entry of a few ids is mostly Python objects, which count as well."""
    memory = PromptMemory(100 * _ENTRY_BYTES)
    for number in range(1000):
        await memory.get_or_build(number, str(number), building.of("x", 0))
    assert len(memory._parts) == 100


async def test_a_part_larger_than_all_room_pushes_nothing_out(building):
    memory = PromptMemory(room(100))
    await memory.get_or_build("s", "a", building.of("x"))
    large = await memory.get_or_build("t", "a", building.of("y", room(1)))
    assert large == Part("y", room(1))
    assert memory._parts.currsize == _ENTRY_BYTES + 10
