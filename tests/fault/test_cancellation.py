"""Whoever waits may leave at any moment: nothing of it stays, and the next one works.

Each coroutine is run as often as it has suspensions, and cancelled at another one each
time; once as it begins to wait, and once as what it waits for has just come.
"""

import asyncio
import contextlib
import functools
import itertools

import pytest
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MediaConnector

from tests.in_process_workers import InProcessEngine
from tests.speaking import wav
from tests.suspensions import MOMENTS, Steps, at_each_suspension, awaiting
from tests.unit import test_deletions, test_ensure, test_inline, test_service
from tests.unit.test_inline import CountingHandler, data_url, web
from tests.waiting import SOON_SECONDS, soon
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.serving.fetching import fetch_audio
from vllm_tts_cache.entrypoints.speakers import deletions, pending
from vllm_tts_cache.entrypoints.speakers.inline import InlineClips
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.errors import SpeakerNotFoundError
from vllm_tts_cache.speaker.rpc_client import AsyncWorkers
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.tenants import ALONE

__all__ = ["media", "web"]  # fixtures
media = test_inline.media
pytestmark = pytest.mark.parametrize("moment", MOMENTS)


class FarEngine(InProcessEngine):
    """As if the workers took their time: an RPC is waited for, before and after."""

    async def collective_rpc(self, *args, **kwargs):
        await asyncio.sleep(0)
        answers = await super().collective_rpc(*args, **kwargs)
        await asyncio.sleep(0)
        return answers


def cancel(task):
    task.cancel()


def is_idle(lookups):
    return lookups._executor._num_pending == 0


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    for module, name, seconds in (
        (pending, "ASK_SECONDS", 0.02),
        (pending, "MIN_ASK_SECONDS", 0.01),
        (pending, "LOOK_SECONDS", 0.005),
        (pending, "LEASE_SECONDS", 0.2),
        (deletions, "ROUND_SECONDS", 0.02),
        (deletions, "MIN_ROUND_SECONDS", 0.005),
        (deletions, "PROGRESS_SECONDS", 0.01),
        (deletions, "AFTER_ERROR_SECONDS", 0.01),
        (deletions, "ORPHANED_SECONDS", 0.05),
    ):
        monkeypatch.setattr(module, name, seconds)


# -------- ensuring


class EnsureRig(test_ensure.Rig):
    """Where a look-up, too, is waited for."""

    def __init__(self, directory):
        super().__init__(directory)
        self.engine = FarEngine(*self.engine.workers)
        self.ensurer = test_ensure.ensurer_of(
            self.engine, self.store, timeout_seconds=20.0, inline=2, is_local=False
        )
        self.lookups = self.ensurer._lookups
        self.seeds = itertools.count()

    def next_need(self, segment=Segment.REGISTERED):
        return self.need(next(self.seeds), segment=segment)

    async def nothing_is_left(self):
        """Of what was cancelled; what goes on by itself is over soon."""
        assert len(self.ensurer.pending) == 0
        await soon(lambda: self.ensurer.pending._task is None)
        await soon(lambda: is_idle(self.lookups))
        await soon(lambda: len(asyncio.all_tasks()) == 1)

    def close(self):
        super().close()
        self.lookups.shutdown()


@pytest.fixture
async def rig(tmp_path):
    made = EnsureRig(tmp_path)
    yield made
    assert made.store.verify() == []
    made.close()


async def ensures(rig, need):
    """A following call works."""
    await asyncio.wait_for(rig.ensurer.ensure(need), SOON_SECONDS)
    assert rig.speakers.prompt(need.ref, need.encoder_names).keys()


@pytest.mark.parametrize("segment", Segment)
@pytest.mark.parametrize("force", [False, True])
async def test_ensuring(rig, moment, segment, force):
    needs = []

    def make():
        needs.append(rig.next_need(segment))
        rig.ensurer._fingerprints = None
        return rig.ensurer.ensure(needs[-1], force=force)

    async for _ in at_each_suspension(make, moment, at_least=2 + (not force)):
        await rig.nothing_is_left()
        await ensures(rig, needs[-1])


async def test_ensuring_what_is_doubted(rig, moment):
    need = rig.next_need()
    await ensures(rig, need)

    def make():
        rig.ensurer.recheck(need.ref.audio_sha256)
        return rig.ensurer.ensure(need)

    async for _ in at_each_suspension(make, moment, at_least=1):
        await rig.nothing_is_left()
        await ensures(rig, need)
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_asking_for_the_status(rig, moment):
    need = rig.next_need()

    def make():
        rig.ensurer._fingerprints = None
        return rig.ensurer.status_of(need, frozenset())

    async for _ in at_each_suspension(make, moment, at_least=2):
        await rig.nothing_is_left()
        assert (await make()).state == "pending"


async def test_reading_an_encoding(rig, moment):
    need = rig.next_need()
    await ensures(rig, need)
    (key, *_) = await rig.ensurer.keys(need)

    def make():
        return rig.ensurer.encoding(key)

    async for _ in at_each_suspension(make, moment, at_least=1):
        await rig.nothing_is_left()
        assert (await make()).num_bytes > 0
    # And that of a full disk, which only a worker has.
    rig.store.files.remove(key.audio_sha256, [key.encoder_fingerprint])
    async for _ in at_each_suspension(make, moment, at_least=2):
        await rig.nothing_is_left()
        assert (await make()).num_bytes > 0
    rig.store.writer.publish(key, await make())


async def test_asking_why_a_request_failed(rig, moment):
    rig.speakers.remember_failed_prompt("request-1", "no prompt")
    make = lambda: rig.ensurer.cause_of_failure("request-1")  # noqa: E731
    async for _ in at_each_suspension(make, moment, at_least=1):
        await rig.nothing_is_left()
        assert await make() == "no prompt"


# -------- the task that asks


async def test_the_task_ends_and_who_waits_is_served_even_so(rig, moment, monkeypatch):
    asker = rig.ensurer.pending
    run = asker._run
    number = 0
    for number in itertools.count(1):
        first = Steps(run(), number, lambda: cancel(asker._task), moment)
        runs = iter([awaiting(first)])
        monkeypatch.setattr(asker, "_run", lambda runs=runs: next(runs, None) or run())
        await ensures(rig, rig.next_need())
        await rig.nothing_is_left()
        if not first.has_acted:
            break
    # How often a loop waits depends on which of the three does a step; never less
    # than this.
    assert number > 2


# -------- inline clips


class InlineRig:
    """The real threads, and a connector that may read a directory."""

    def __init__(self, store, media):
        self.store = store
        self.lookups = ReadExecutor(is_local=False)
        self.clips = InlineClips(
            store, self.lookups, max_fetches=1, refuses=lambda _: False
        )
        self.connection = HTTPConnection()
        connector = MediaConnector(
            allowed_local_media_path=str(media), connection=self.connection
        )
        self.fetch = functools.partial(fetch_audio, connector)
        self.num_clips = itertools.count()

    def new_data_url(self):
        return data_url(wav(pitch_hz=150 + next(self.num_clips)))

    def resolve(self, url):
        return self.clips.resolve(url, self.fetch)

    async def nothing_is_left(self):
        assert len(self.clips._fetches) == len(self.clips._decodes) == 0
        await soon(lambda: self.clips._executor._num_pending == 0)
        await soon(lambda: is_idle(self.lookups))
        await soon(lambda: len(asyncio.all_tasks()) == 1)

    async def close(self):
        self.clips.shutdown()
        self.lookups.shutdown()
        await (await self.connection.get_async_client()).close()


@pytest.fixture
async def inline(tmp_path, media):
    store = open_store(Settings(samples_dir=tmp_path / "voices"))
    made = InlineRig(store, media)
    yield made
    await made.close()
    assert store.verify() == []
    store.close()


async def test_resolving_a_data_url(inline, moment):
    urls = []

    def make():
        urls.append(inline.new_data_url())
        return inline.resolve(urls[-1])

    async for _ in at_each_suspension(make, moment, at_least=2):
        await inline.nothing_is_left()
        assert inline.store.has_audio((await inline.resolve(urls[-1])).ref.audio_sha256)


async def test_resolving_a_data_url_that_is_known(inline, moment):
    url = inline.new_data_url()
    known = await inline.resolve(url)
    async for _ in at_each_suspension(lambda: inline.resolve(url), moment, at_least=2):
        await inline.nothing_is_left()
        assert await inline.resolve(url) == known


@pytest.mark.parametrize("kind", ["data", "file", "http"])
async def test_what_is_made_of_a_url_ends_with_who_waits_for_it(
    inline, moment, kind, media, request, monkeypatch
):
    """At each suspension of the task that all who wait for it share."""
    method = "_decode" if kind == "data" else "_fetch"
    work = getattr(inline.clips, method)
    monkeypatch.setattr(CountingHandler, "pause_seconds", 0.01)
    address = request.getfixturevalue("web") if kind == "http" else media.as_uri()
    number = 0
    for number in itertools.count(1):
        url = inline.new_data_url() if kind == "data" else f"{address}/clip.wav"
        waiting, steps = [], []

        def leave(waiting=waiting):
            for task in waiting:
                task.cancel()

        def stepwise(*args, number=number, steps=steps, leave=leave):
            steps.append(Steps(work(*args), number, leave, moment))
            return awaiting(steps[0])

        monkeypatch.setattr(inline.clips, method, stepwise)
        waiting += [asyncio.create_task(inline.resolve(url)) for _ in range(2)]
        await asyncio.wait(waiting)
        await inline.nothing_is_left()
        monkeypatch.setattr(inline.clips, method, work)
        clip = await inline.resolve(url)
        assert inline.store.has_audio(clip.ref.audio_sha256)
        if not steps[0].has_acted:
            break
    assert number > 1


# -------- deletions


class DeletionRig(test_service.Rig):
    """A service whose look-ups are waited for, and its workers far away."""

    def __init__(self, directory):
        super().__init__(directory)
        self.engine = FarEngine(*self.engine.workers)
        self.lookups = ReadExecutor(is_local=False)
        own = self.service.deletions
        workers = AsyncWorkers(self.engine)
        self.service.encodings.cloning_workers = lambda: workers
        own._lookups = self.lookups

    async def close(self):
        await super().close()
        self.lookups.shutdown()

    async def voice(self, name="Ann"):
        record = await self.register(name, ref_text="words")
        await self.precompute(name)
        return record.audio_sha256

    async def nothing_is_left(self, sha):
        left = lambda: test_deletions.left_of(self, sha)  # noqa: E731
        await soon(lambda: left() == test_deletions.NOTHING)
        await soon(lambda: not self.store.num_unfinished_deletions())
        await soon(lambda: is_idle(self.lookups))
        own = self.service.deletions
        for executor in (own._clients, own._own, own._removals):
            await soon(lambda executor=executor: executor._num_pending == 0)


@pytest.fixture
async def deleting(tmp_path):
    made = DeletionRig(tmp_path)
    yield made
    assert made.store.verify() == []
    await made.close()


async def test_deleting_a_voice(deleting, moment):
    """Who leaves before anything was done has done nothing; else it goes on."""
    voices = []

    async def prepared():
        voices.append(await deleting.voice())

    await prepared()
    make = lambda: deleting.service.deletions.delete("Ann", ALONE.name)  # noqa: E731
    async for _ in at_each_suspension(make, moment, at_least=3):
        await soon(lambda: deleting.service.deletions._clients._num_pending == 0)
        with contextlib.suppress(SpeakerNotFoundError):
            await make()
        await deleting.nothing_is_left(voices[-1])
        with pytest.raises(SpeakerNotFoundError):
            await make()
        await prepared()


@pytest.mark.parametrize("loop", ["_remove_files", "_confirm"])
async def test_a_shutdown_leaves_deletions_to_the_next(tmp_path, moment, loop):
    number = 0
    for number in itertools.count(1):
        first = DeletionRig(tmp_path)
        own = first.service.deletions
        for task in own._tasks:
            task.cancel()
        sha = await first.voice()
        own.carry_out(first.store.registrations.delete("Ann"))
        steps = Steps(own._repeat(getattr(own, loop)), number, own.shutdown, moment)
        stepped = asyncio.create_task(awaiting(steps))
        others = {own._round, own._remove_files, own._confirm} - {getattr(own, loop)}
        beside = [asyncio.create_task(own._repeat(other)) for other in others]
        own._tasks = [stepped, *beside]
        unfinished = first.store.num_unfinished_deletions
        await soon(lambda steps=steps, left=unfinished: steps.has_acted or not left())
        if is_finished := not steps.has_acted:
            own.shutdown()
        await soon(lambda own=own: all(task.done() for task in own._tasks))
        first.service.shutdown()
        first.speakers.close()
        second = DeletionRig(tmp_path)
        await second.nothing_is_left(sha)
        assert second.store.verify() == []
        await second.close()
        if is_finished:
            break
    # How often a loop waits depends on which of the three does a step; never less
    # than this.
    assert number > 3
