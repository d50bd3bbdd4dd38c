"""The schedule of the simulated fleet, and the oracle that its answers are held to."""

import argparse
import asyncio
import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet_simulation_faults import FAULTS, LONG, Faults, kind_of, start
from benchmarks.fleet_simulation_machines import (
    Machine,
    MachineGoneError,
    clip,
    heard_in,
)
from benchmarks.fleet_simulation_outside import BucketProxy, Databases, filler_name
from vllm_tts_cache.entrypoints.speakers.ensure import PRECOMPUTE_SECONDS
from vllm_tts_cache.store.speaker_store import SpeakerStore

# The shortest that is allowed: deletions wait for a killed server so long.
GRACE_SECONDS = 12.0
# After a change failed, it may still be committed for so long.
UNSETTLED_SECONDS = 3.0
# A last row is spoken while the catalogue is out of reach, and shortly after that.
STALE_SECONDS = GRACE_SECONDS + 2.0
LATE_ERROR_SECONDS = 2.0
LATE_SECONDS = 8.0  # a copy that a reader writes while its voice is deleted
NEW_SECONDS = 60.0  # a machine that starts removes copies of what was deleted meanwhile
HUNG_SECONDS = 600.0
RETRY_SECONDS = 0.5
GIVE_UP_SECONDS = 400.0  # on a deletion that is sent again and again
MAX_SHOWN = 10  # of what is broken, of each kind
SHARED_CLIPS = range(20)
SHARED_PART = 0.15
OPERATIONS = {
    "speak": 50,
    "register": 14,
    "delete": 8,
    "audio": 10,
    "look": 12,
    "change": 4,
    "rename": 2,
}
CHANGES = ("register", "delete", "change", "rename")
INVARIANTS = (
    "wrong voices",
    "deleted voices spoken",
    "lost voices",
    "lost audio",
    "lost objects",
    "voices that do not speak",
    "left of deleted voices",
    "left objects",
    "left copies",
    "double encodes",
    "wrong sums",
    "deletions without an end",
    "requests without an answer",
    "unexpected errors",
)

State = tuple[int, str | None] | None  # the clip's number and the transcript; no voice


@dataclass(eq=False)
class Voice:
    """What a look-up of one name may find.

    Attributes:
        may: The states that it may have now; several while a change is under way, or
            after one of which it is not known whether it was committed.
        is_changing: Whether a change is under way.
        settled_from: From when on a look-up shows which of the states it has.
        seen_by: What each request under way may find, which grows with changes.
        stale: States that an answered change ended, and until when a server that does
            not reach the catalogue may go on with them. A deleted one is not among
            them.
    """

    may: set[State] = field(default_factory=lambda: {None})
    is_changing: bool = False
    settled_from: float = 0.0
    seen_by: list[set[State]] = field(default_factory=list)
    stale: dict[State, float] = field(default_factory=dict)

    def widen(self, state: State) -> None:
        """Allow one more state, also for requests under way."""
        for seen in (self.may, *self.seen_by):
            seen.add(state)

    @contextmanager
    def looked_at(self) -> Iterator[set[State]]:
        """Yield what a request may find that goes on as long as the block."""
        seen = set(self.may)
        self.seen_by.append(seen)
        try:
            yield seen
        finally:
            self.seen_by = [each for each in self.seen_by if each is not seen]

    def ended_by(self, state: State) -> None:
        """Have a state alone from now on; the others become stale."""
        until = time.monotonic() + STALE_SECONDS
        self.stale |= dict.fromkeys(self.may - {state}, until)
        self.may = {state}

    def is_stale(self, state: State, began: float) -> bool:
        """Whether a request of then may have spoken it by the last row."""
        return began <= self.stale.get(state, 0.0)


@dataclass(eq=False)
class Fleet:
    """The machines, and what they share.

    Attributes:
        objects: The directory in which the S3 server keeps the fleet's objects.
        store: The simulation's own, with a directory of its own.
    """

    servers: list[Machine]
    replicas: list[Machine]
    databases: Databases
    proxy: BucketProxy
    objects: Path
    store: SpeakerStore

    @property
    def machines(self) -> list[Machine]:
        return self.servers + self.replicas

    def running(self, machines: Sequence[Machine] | None = None) -> list[Machine]:
        """Return those that are up and not frozen, of all or of some."""
        chosen = self.machines if machines is None else machines
        return [each for each in chosen if each.is_up and not each.is_frozen]

    def stored_objects(self, sha: str = "") -> set[str]:
        """Return names of the objects in the bucket, of one audio or of all."""
        below = self.objects / (f"objects/{sha[:2]}/{sha}" if sha else "objects")
        found = below.rglob("*") if below.is_dir() else ()
        return {str(p.relative_to(self.objects)) for p in found if p.is_file()}

    def copies(self, machine: Machine, sha: str = "*") -> list[Path]:
        """Return a machine's copies of objects, of one audio or of all."""
        prefix = "*" if sha == "*" else sha[:2]
        return sorted((machine.voices / "store").glob(f"{prefix}/{sha}/*"))


class Simulation:
    """Runs the schedule, breaks things, and holds each answer to the oracle.

    Attributes:
        voices: The active ones, by name.
        counts: What happened, for the table.
        times: Milliseconds of each operation.
        broken: Invariant -> a line for each time that it did not hold.
        windows: Kind, beginning and end of each fault, in monotonic seconds.
        ended: Audio -> when its last voice may have been deleted or replaced.
        damaged: Audios of which an object was damaged where it lies.
        brought_back: Objects that are in the catalogue again, and were removed since a
            commit that a failover lost: of a deletion, or of a file put in their place.
        strays: Objects that only a lost commit knew; `remove_strays` removes them.
        lost: Clips of registrations that a failover lost, by number: what machines
            have of them is removed by their next recovery, and looked for at the end.
        epoch: How many failovers have lost commits.
    """

    def __init__(self, fleet: Fleet, options: argparse.Namespace):
        self.fleet, self.options = fleet, options
        self.chance = random.Random(options.seed)
        self._num_shown: Counter[str] = Counter()
        self.voices = {f"active {n}": Voice() for n in range(options.active)}
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.broken: defaultdict[str, list[str]] = defaultdict(list)
        self.windows: list[tuple[str, float, float]] = []
        self.ended: defaultdict[str, list[float]] = defaultdict(list)
        self.damaged: set[str] = set()
        self.brought_back: set[str] = set()
        self.strays: set[str] = set()
        self.lost: set[int] = set()
        self.number_of: dict[str, int] = {}
        self.sha_of: dict[int, str] = {}
        self.heard: dict[int, str] = {}
        for number in SHARED_CLIPS:
            self._make_clip(number)
        self.epoch = 0
        self._names = list(self.voices)
        self._requests: set[asyncio.Task[None]] = set()
        self._faults: set[asyncio.Task[None]] = set()
        self._num_deletes = 0
        self._num_out: Counter[str] = Counter()
        self._mistake: BaseException | None = None
        self._began = time.monotonic()

    # -------- the schedule

    async def register_first(self) -> None:
        """Register a voice that every server finds to be without an encoding.

        Servers look for such voices behind the last one that they found, and those
        that have found none look through all of them every few seconds.
        """
        await asyncio.sleep(PRECOMPUTE_SECONDS + 1)  # they ask the replicas at first
        for replica in self.fleet.replicas:
            replica.kill()
        await self._register(self.fleet.servers[0], self._names[0])
        await asyncio.sleep(PRECOMPUTE_SECONDS + 1)
        await asyncio.gather(*map(start, self.fleet.replicas))

    async def run(self) -> None:
        """Do the steps, and more for as long as faults are left."""
        num_steps, step = self.options.steps, 0
        drawn, due = self._drawn_faults(num_steps), deque[str]()
        while step < num_steps or due or self._faults:
            due += drawn.get(step, [])
            for kind in list(due):
                # One at a time, of the database and of the bucket.
                if kind_of(kind) == "machine" or not self._num_out[kind_of(kind)]:
                    due.remove(kind)
                    self._begin(self._break(kind), self._faults)
                    await asyncio.sleep(0)
            self._begin(self._within(self._operation()), self._requests)
            while len(self._requests) >= self.options.at_once:
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(self._requests, return_when=first)
            await asyncio.sleep(0)
            if self._mistake is not None:
                raise self._mistake
            step += 1
            if step % max(1, num_steps // 20) == 0:
                self.say(f"step {step:,} of {num_steps:,}")
        while self._requests:
            await asyncio.wait(set(self._requests))
        self.counts["steps"] = step
        self.say("all steps are done")

    def say(self, text: str) -> None:
        """Print how far it is."""
        took = time.monotonic() - self._began
        done = ", ".join(f"{self.counts[what]:,} {what}" for what in OPERATIONS)
        num_up, num_bad = len(self.fleet.running()), sum(map(len, self.broken.values()))
        print(
            f"{took:6.0f} s: {text}; {num_up} machines up; "
            f"{self.faults.total()} faults; {done}; broken: {num_bad}",
            flush=True,
        )
        for kind, lines in self.broken.items():
            for line in lines[self._num_shown[kind] : MAX_SHOWN]:
                print(f"BROKEN {kind}: {line}", flush=True)
            self._num_shown[kind] = len(lines)

    def is_excused(self, begin: float, end: float, *kinds: str) -> bool:
        """Whether a fault of these kinds, or any that lasts, was on meanwhile."""
        return any(
            since < end and until > begin and kind.startswith(kinds or LONG)
            for kind, since, until in self.windows
        )

    def server(self) -> Machine:
        """Draw a server that answers."""
        servers = self.fleet.servers
        return self.chance.choice(self.fleet.running(servers) or servers)

    def _drawn_faults(self, num_steps: int) -> dict[int, list[str]]:
        """Draw each kind once, others by how often they are, and when they begin."""
        chance = random.Random(f"faults {self.options.seed}")
        num_more = num_steps // self.options.steps_per_fault - len(FAULTS)
        kinds = list(FAULTS)
        kinds += chance.choices(kinds, list(FAULTS.values()), k=max(0, num_more))
        chance.shuffle(kinds)
        drawn = defaultdict[int, list[str]](list)
        for place, kind in enumerate(kinds):
            share = 0.05 + 0.9 * (place + chance.random()) / len(kinds)
            drawn[int(share * num_steps)].append(kind)
        return drawn

    async def _break(self, kind: str) -> None:
        at, began, of_what = len(self.windows), time.monotonic(), kind_of(kind)
        self.faults[kind] += 1
        self._num_out[of_what] += 1
        self.windows.append((kind, began, math.inf))

        def mended() -> None:
            # What was under way when it ended may fail as well.
            until = min(self.windows[at][2], time.monotonic() + LATE_ERROR_SECONDS)
            self.windows[at] = (kind, began, until)

        try:
            with suppress(MachineGoneError):
                await Faults(self).of(kind, mended)
        finally:
            mended()
            self._num_out[of_what] -= 1

    def _begin(self, act: Awaitable[None], tasks: set[asyncio.Task[None]]) -> None:
        def end(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._mistake = self._mistake or task.exception()

        task = asyncio.ensure_future(act)
        tasks.add(task)
        task.add_done_callback(end)

    async def _within(self, act: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(act, HUNG_SECONDS)
        except MachineGoneError:
            self.counts["requests cut by a kill"] += 1
        except TimeoutError:
            self.broken["requests without an answer"].append(repr(act))

    def _operation(self) -> Awaitable[None]:
        what = self.chance.choices([*OPERATIONS], [*OPERATIONS.values()])[0]
        name = self.chance.choice(self._names)
        is_full = what == "delete" and 3 * self._num_deletes >= self.options.at_once
        if what in CHANGES and (self.voices[name].is_changing or is_full):
            what = "speak"
        return getattr(self, f"_{what}")(self.server(), name)

    # -------- requests that change nothing

    async def _speak(self, server: Machine, name: str) -> None:
        await self.heard_of(server, name, "speak")

    async def _audio(self, server: Machine, name: str) -> None:
        await self.heard_of(server, name, "audio")

    async def heard_of(self, server: Machine, name: str, what: str) -> dict[str, Any]:
        """Speak a voice or read its audio, and hold the answer to the oracle."""
        voice, began = self.voices[name], time.monotonic()
        with voice.looked_at() as seen:
            answer = await server.ask(what, name=name)
        if "error" in answer:
            await self._bear(what, answer)
            return answer
        self.counts[what] += 1
        self._time("find", answer["find_ms"], began)
        self._time(what, answer["ms"], began)
        self._judge(name, answer, seen, began)
        return answer

    def _judge(
        self, name: str, answer: dict[str, Any], seen: set[State], began: float
    ) -> None:
        voice, sha, heard = self.voices[name], answer["sha"], answer.get("heard")
        number = self.number_of.get(sha, -1)
        state = None if sha is None else (number, answer["text"])
        is_last_row = answer["is_last_row"]
        if heard is not None and heard != self.heard.get(number):
            self.broken["wrong voices"].append(f"{name}: {sha} sounds as {heard}")
        if is_last_row and state not in seen and voice.is_stale(state, began):
            self.counts["spoken by the last row of an outage"] += 1
        elif state not in seen:
            kind = "wrong voices" if state is not None else "lost voices"
            if state is not None and seen == {None}:
                kind = "deleted voices spoken"
            by = "the last row" if is_last_row else "the catalogue"
            self.broken[kind].append(f"{name}: {state} by {by}, may be {seen}")
        is_settled = began > voice.settled_from and not voice.is_changing
        if is_settled and not is_last_row and state in voice.may:
            voice.may = {state}

    async def _look(self, server: Machine, _: str) -> None:
        """Look up a voice of which there are only rows."""
        number, began = 1 + self.chance.randrange(self.options.voices), time.monotonic()
        tenant, name = filler_name(number)
        answer = await server.ask("look", name=name, tenant=tenant)
        if "error" in answer:
            await self._bear("look", answer)
            return
        self.counts["look"] += 1
        self._time("find", answer["find_ms"], began)
        if answer["text"] != f"What the voice {number} says.":
            self.broken["wrong voices"].append(f"{name}: {answer}")

    # -------- changes

    async def _register(self, server: Machine, name: str) -> None:
        number = self.chance.choice(SHARED_CLIPS)
        if self.chance.random() > SHARED_PART:
            number = len(self.sha_of)
            self._make_clip(number)
        text = self.chance.choice([None, f"text {self.chance.randrange(100)}"])
        ask = partial(server.ask, "register", name=name, number=number, text=text)
        await self.changed("register", ask, {name: (number, text)})

    async def _change(self, server: Machine, name: str) -> None:
        (before, *others) = self.voices[name].may
        if before is not None and not others:
            text = f"text {self.chance.randrange(100)}"
            ask = partial(server.ask, "change", name=name, given={"ref_text": text})
            await self.changed("change", ask, {name: (before[0], text)})

    async def _rename(self, server: Machine, name: str) -> None:
        new_name = self.chance.choice(self._names)
        (before, *others) = self.voices[name].may
        if before is not None and not others and self.voices[new_name].may == {None}:
            ask = partial(server.ask, "change", name=name, given={"name": new_name})
            await self.changed("rename", ask, {name: None, new_name: before})

    async def changed(
        self,
        what: str,
        ask: Callable[[], Awaitable[dict[str, Any]]],
        after: dict[str, State],
    ) -> None:
        """Change voices, and what the oracle allows of them."""
        voices = {self.voices[name]: state for name, state in after.items()}
        if any(voice.is_changing for voice in voices):
            return
        epoch, began = self.epoch, time.monotonic()
        before = {state for voice in voices for state in voice.may}
        for voice, state in voices.items():
            voice.is_changing = True
            voice.widen(state)
        answer: dict[str, Any] = {"error": "its server was killed"}
        try:
            answer = await ask()
        finally:
            kept = {state[0] for state in after.values() if state is not None}
            self._end_lives(state for state in before if state and state[0] not in kept)
            for voice, state in voices.items():
                voice.is_changing = False
                if "error" in answer or epoch != self.epoch:
                    voice.settled_from = time.monotonic() + UNSETTLED_SECONDS
                else:
                    voice.ended_by(state)
        if "error" in answer:
            await self._bear(what, answer)
        else:
            if epoch == self.epoch:
                self.lost -= kept
            self.counts[what] += 1
            self._time(what, answer["ms"], began)

    async def _delete(self, server: Machine, name: str) -> None:
        """Delete a voice, and send it again until it is answered, as a client does."""
        voice = self.voices[name]
        if voice.is_changing or voice.may == {None}:
            return
        voice.is_changing = True
        voice.widen(None)
        self._num_deletes += 1
        began, is_answered = time.monotonic(), False
        try:
            is_answered = await self._delete_until_answered(server, name)
        finally:
            voice.is_changing = False
            self._num_deletes -= 1
            gone = {state for state in voice.may if state is not None}
            self._end_lives(gone)
            voice.settled_from = time.monotonic() + UNSETTLED_SECONDS
        if not is_answered:
            return
        voice.may = {None}
        voice.stale.clear()
        self.counts["delete"] += 1
        self._time("delete", 1e3 * (time.monotonic() - began), began)
        for number in {number for number, _ in gone}:
            await self._check_nothing_left(number)

    async def _delete_until_answered(self, server: Machine, name: str) -> bool:
        began, is_sent = time.monotonic(), False
        while time.monotonic() < began + GIVE_UP_SECONDS:
            epoch = self.epoch
            try:
                answer = await server.ask("delete", name=name)
            except MachineGoneError:
                answer = {"error": "its server was killed"}
            error = answer.get("error")
            is_gone = error is None or (is_sent and error == "SpeakerNotFoundError")
            if is_gone and epoch == self.epoch:
                return True
            if error is not None:
                await self._bear("delete", answer)
            is_sent = True
            server = self.server()
        self.broken["deletions without an end"].append(f"{name}: {answer}")
        return False

    def _end_lives(self, states: Iterable[State]) -> None:
        """Note that audios may have been deleted: they are encoded anew after that."""
        for state in states:
            if state is not None:
                self.ended[self.sha_of[state[0]]].append(time.monotonic())

    def take_over(self, rows: Sequence[tuple[str, str, str | None]]) -> None:
        """Allow what a database has that was promoted without the last commits."""
        self.epoch += 1
        found = {name: (self.number_of[sha], text) for name, sha, text in rows}
        before = {state[0] for v in self.voices.values() for state in v.may if state}
        self.lost |= before - {number for number, _ in found.values()}
        for name, voice in self.voices.items():
            state = found.get(name)
            if state not in voice.may:
                self.counts["voices that a failover set back"] += 1
            voice.widen(state)
            voice.settled_from = time.monotonic() + UNSETTLED_SECONDS
            if not voice.is_changing:
                voice.ended_by(state)

    def _make_clip(self, number: int) -> None:
        audio = clip(number)
        self.number_of[audio.audio_sha256] = number
        self.sha_of[number] = audio.audio_sha256
        self.heard[number] = heard_in(audio).hex()

    # -------- what is left of a deleted voice

    async def _check_nothing_left(self, number: int) -> None:
        """Look for an audio on every machine that is up, and in the bucket."""
        if number in self.lost:
            self.counts["deletions of what a failover had lost"] += 1
            return
        sha, epoch = self.sha_of[number], self.epoch
        until = time.monotonic() + LATE_SECONDS
        while (left := await self._left_of(sha)) and time.monotonic() < until:
            if self._has(number) or epoch != self.epoch:
                return
            await asyncio.sleep(0.5)
        if left:
            query = "SELECT object_name FROM loose_object WHERE audio_sha256 = %s"
            rows = await asyncio.to_thread(self.fleet.databases.query, query, sha)
            late = {f"the bucket's {name}" for (name,) in rows}
            self.counts["objects whose upload was not acknowledged"] += len(late)
            left -= late | {f"the bucket's {name}" for name in self.strays}
        self.counts["deletions looked after"] += 1
        if left and not self._has(number):
            self.broken["left of deleted voices"].append(f"{sha}: {sorted(left)}")

    def _has(self, number: int) -> bool:
        every = (state for voice in self.voices.values() for state in voice.may)
        return any(state is not None and state[0] == number for state in every)

    async def _left_of(self, sha: str) -> set[str]:
        left = {f"the bucket's {name}" for name in self.fleet.stored_objects(sha)}
        for machine in self.fleet.running():
            is_new = time.monotonic() < machine.since + NEW_SECONDS
            if machine.num_starts > 1 and is_new:
                continue
            copies = self.fleet.copies(machine, sha)
            left |= {f"{machine.name}'s {path.name}" for path in copies}
            with suppress(MachineGoneError):
                if (await machine.ask("holds", sha=sha))["is_held"]:
                    left.add(f"{machine.name}'s memory")
        return left

    # -------- counting

    async def _bear(self, what: str, answer: dict[str, Any]) -> None:
        """Count an error, and wait as a client does that was told to retry."""
        error = answer["error"]
        self.counts[f"failed {what}: {error}"] += 1
        if error.startswith("unexpected"):
            self.broken["unexpected errors"].append(f"{what}: {answer['why']}")
        await asyncio.sleep(RETRY_SECONDS)

    def _time(self, what: str, took_ms: float, began: float) -> None:
        self.times[what].append(took_ms)
        if not self.is_excused(began, time.monotonic()):
            self.times[f"{what} without a fault"].append(took_ms)
