"""How many calls and modules of ours each flow takes, held to `[tool.house.hops]`.

A count above its budget fails. One below is a warning that asks for a lower budget in
the same commit, and fails where it is further below than `make house` lets a count be.
"""

import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

import vllm_tts_cache
from scripts.house import budgets, is_far_below
from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    clip,
    decoded,
    new_speaker,
    wait_until_idle,
    worker_speakers,
    worker_with,
)
from tests.store_samples import settings_of
from vllm_tts_cache.entrypoints.serving import request_speaker
from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.tenants import ALONE, speaking_for

PACKAGE = str(Path(vllm_tts_cache.__file__).parent)
pytestmark = pytest.mark.filterwarnings("default:.*takes.*budget:UserWarning")
ENCODE_THREAD = "tts-cache-encode"
# The first run of a flow also makes folders and fills caches. The shortest of the rest
# is the flow itself: a machine that is slow at a moment adds a poll of the catalogue.
NUM_RUNS = 4
# More than any period of what asks for encodes: none of what a run does depends on when
# the one before ended.
QUIET_SECONDS = 0.3
SETTLED_SECONDS = 0.1
VOICE = "Ann"


class Hops:
    """Calls of our functions on the calling thread and on the encode thread.

    Other threads (recency, recovery, leases) work whether or not a flow runs. Each
    resumption of a coroutine or generator counts, as a reader comes back to it; a
    comprehension does not, as it is read with the function around it.
    """

    def __init__(self) -> None:
        self._caller = threading.current_thread()
        self._is_counting = False
        self._calls: list[tuple[str, str]] = []

    @contextmanager
    def observing(self):
        """See this thread, and all threads that start in here."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        time.sleep(QUIET_SECONDS)
        self._calls = []
        self._is_counting = True

    def end(self) -> list[tuple[str, str]]:
        """Return the calls, once the encode thread makes no more of them."""
        num_seen = -1
        while num_seen < (num_seen := len(self._calls)):
            time.sleep(SETTLED_SECONDS)
        self._is_counting = False
        return self._calls

    @contextmanager
    def paused(self):
        """The calling thread does nothing in here that belongs to a flow."""
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self._is_counting:
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not is_comprehension(code):
            thread = threading.current_thread()
            if thread is self._caller or thread.name == ENCODE_THREAD:
                self._calls.append((code.co_filename[len(PACKAGE) + 1 :], code.co_name))


def is_comprehension(code: CodeType) -> bool:
    """Python 3.12 makes no call of one any more."""
    return code.co_name in {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class WaitingEngine(InProcessEngine):
    """Answers a call when the encodes that it began are over: no poll comes between."""

    def __init__(self, hops, *workers):
        super().__init__(*workers)
        self._hops = hops

    def called(self, method, args=()):
        answers = super().called(method, args)
        with self._hops.paused():
            for each in self.workers:
                wait_until_idle(each.model_runner.model.tts_cache_speakers)
        return answers


class HostAdapter:
    def validate(self, request: Any) -> str | None:
        return None


class Adapter(CachedAdapter, HostAdapter):
    """The steps that all families share; its own one hands the reference on."""

    tts_cache_family = default_family()

    async def clone(self, speaker):
        return PreparedRequest(prompt={"ref": speaker.clip.ref.to_wire()})


class Request(SimpleNamespace):
    def model_copy(self, update):
        return Request(**{**vars(self), **update})


def request():
    fields = "ref_audio ref_text speaker_embedding extra_params x_vector_only_mode"
    fields += " task_type instructions language"
    unset = dict.fromkeys(fields.split())
    return Request(voice=VOICE, input="Hello.", **unset)


class Rig:
    """An API process and its worker in this process, without their background tasks."""

    def __init__(self, directory, hops):
        self.hops = hops
        family = default_family()
        self.encoders = [SpectrumEncoder(name) for name in family.encoders]
        self.speakers = worker_speakers(directory, self.encoders)
        engine = WaitingEngine(hops, worker_with(self.speakers))
        model = ServedModel(
            family=lambda: family, refusal=lambda: None, note=lambda: ""
        )
        self.service = SpeakerService(settings_of(directory), engine, model)
        self.store = self.service.store
        server = SimpleNamespace(speakers=self.service, builtin_names=frozenset())
        self.adapter = Adapter()
        self.adapter.ctx = SimpleNamespace(server=server)
        # There is no checkpoint that would have to be looked into.
        vars(self.adapter)["tts_cache_refusal"] = None

    def register(self, name, seed):
        return self.store.registrations.register(
            new_speaker(name, clip(seed)), decoded(clip(seed))
        ).record

    def need(self, record):
        return self.service.model.need_of(record)

    async def speak(self):
        """Validate and build, and return the calls of both and what came of it."""
        asked = request()
        with speaking_for(ALONE), request_speaker.observe_outcomes() as outcomes:
            self.hops.begin()
            assert self.adapter.validate(asked) is None
            await self.adapter.build(asked, [], False)
            calls = self.hops.end()
        return calls, outcomes.seen

    def delete(self, name):
        """Do the store's part of a DELETE; this process is the only participant."""
        deletion = self.store.registrations.delete(name)
        self.store.remove_files(deletion)
        for each in self.store.participants.deletions_to_confirm():
            self.store.participants.confirm(each.id)
        return self.store.progress(name)

    def close(self):
        self.service.shutdown()
        self.speakers.close()


@pytest.fixture
async def rig(tmp_path):
    with Hops().observing() as hops:
        made = Rig(tmp_path, hops)
        yield made
    made.close()


class BelowBudget(UserWarning):
    """A flow takes less than it may."""


async def check(flow, run):
    """Hold the shortest of some runs against the budget in `[tool.house.hops]`."""
    calls = min([await run(number) for number in range(NUM_RUNS)], key=len)
    found = {"calls": len(calls), "modules": len({file for file, _ in calls})}
    most = [f"{num} x {file} {name}" for (file, name), num in ranked(calls)]
    for what, budget in budgets()["hops"][flow].items():
        sys.stdout.write(f"\n{flow:8} {what:15} {found[what]:8}   budget {budget:8}")
        said = f"{flow} takes {found[what]} {what}, its budget is {budget}"
        assert found[what] <= budget, f"{said}. Most often: {', '.join(most)}"
        lower = f"{said}: lower it in [tool.house.hops] of pyproject.toml"
        assert not is_far_below(found[what], budget), lower
        if found[what] < budget:
            warnings.warn(BelowBudget(lower), stacklevel=2)


def ranked(calls):
    return Counter(calls).most_common(12)


async def test_a_warm_request(rig):
    record = rig.register(VOICE, 0)
    await rig.service.encodings.ensure(rig.need(record))

    async def run(number):
        calls, outcome = await rig.speak()
        assert outcome == ["hit"]
        return calls

    await check("warm", run)


async def test_registering_in_the_store(rig):
    async def run(number):
        audio = clip(number)
        new = new_speaker(f"voice {number}", audio)
        rig.hops.begin()
        rig.store.registrations.register(new, decoded(audio))
        return rig.hops.end()

    await check("register", run)


async def test_ensuring_what_is_not_encoded(rig):
    async def run(number):
        record = rig.register(f"voice {number}", number)
        need = rig.need(record)
        rig.hops.begin()
        # A request has looked up what is stored, with its speaker.
        existed = await rig.service.encodings.ensure(need, stored=frozenset())
        calls = rig.hops.end()
        assert not existed
        return calls

    await check("ensure", run)


async def test_deleting_in_the_store(rig):
    assert rig.store.participants.join()

    async def run(number):
        name = f"voice {number}"
        record = rig.register(name, number)
        await rig.service.encodings.ensure(rig.need(record))
        rig.hops.begin()
        progress = rig.delete(name)
        calls = rig.hops.end()
        assert progress.is_finished
        return calls

    await check("delete", run)
