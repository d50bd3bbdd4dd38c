"""What is checked when everything of the simulated fleet is mended again."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fleet_simulation_faults import known_objects, lost_objects
from benchmarks.fleet_simulation_machines import heard_in
from benchmarks.fleet_simulation_schedule import Simulation
from vllm_tts_cache.catalogue import owners, stored_files
from vllm_tts_cache.errors import SourceCorruptError
from vllm_tts_cache.store.blobs import BucketOwner

SETTLE_SECONDS = 300.0
TURN_SECONDS = 30.0
# A replica notes a publishing after it has stored it.
NOTE_SECONDS = 5.0
AGAIN = "deleted and registered again"
_LATER = "UPDATE loose_object SET removable_from = removable_from - 7200"
_UNFINISHED = "SELECT count(*) FROM deletion WHERE files_removed = 0"


class Ending:
    """Waits until nothing is left to do, and looks at what there is."""

    def __init__(self, simulation: Simulation):
        self._of, self._fleet = simulation, simulation.fleet

    async def check(self) -> None:
        """Add what is wrong to what is broken."""
        await self._until("deletions without an end", self._have_ended)
        self._of.say("deletions are finished")
        await self._until("recoveries without an end", self._have_recovered)
        self._of.say("recoveries are finished")
        await self._read_all()
        self._of.say("all voices are read")
        await asyncio.to_thread(self._check_objects)
        await self._check_copies()
        await asyncio.to_thread(self._check_sums)
        self._of.say("bucket, copies and sums are checked")
        self._check_encodes()

    async def _until(self, what: str, is_over: Callable[[], Awaitable[bool]]) -> None:
        until = time.monotonic() + SETTLE_SECONDS
        while not await is_over():
            if time.monotonic() > until:
                self._of.broken[what].append("at the end")
                return
            await asyncio.sleep(0.5)

    async def _have_ended(self) -> bool:
        rows = await asyncio.to_thread(self._fleet.databases.query, _UNFINISHED)
        return rows == [(0,)]

    async def _have_recovered(self) -> bool:
        answers = [await each.ask("memory") for each in self._fleet.machines]
        if any(answer["is_recovering"] for answer in answers):
            return False
        for machine, answer in zip(self._fleet.machines, answers, strict=True):
            self._of.times[f"{machine.kind}, MiB"].append(answer["rss"] / 1024**2)
        return True

    async def _read_all(self) -> None:
        slots = asyncio.Semaphore(self._of.options.at_once)

        async def read(name: str) -> None:
            async with slots:
                await self._read(name)

        await asyncio.gather(*map(read, self._of.voices))

    async def _read(self, name: str) -> None:
        """Read a voice's object from the bucket, and speak the voice."""
        of, store = self._of, self._fleet.store
        found = await asyncio.to_thread(store.find, name)
        sha = None if found is None else found.record.audio_sha256
        if found is not None and sha is not None:
            number, text = of.number_of[sha], found.record.ref_text
            if sha in of.damaged:  # what heals it: the clip is registered once more
                send = partial(of.server().ask, "register", name=name)
                again = partial(send, number=number, text=text)
                await of.changed("register", again, {name: (number, text)})
            if not await asyncio.to_thread(self._is_whole, sha):
                lost = await asyncio.to_thread(lost_objects, self._fleet, [sha])
                if lost and lost <= of.brought_back:
                    of.counts["voices brought back by a failover without audio"] += 1
                    return
                of.broken["lost audio"].append(f"{name}: {sha}")
        answer = await of.heard_of(of.server(), name, "speak")
        if "error" in answer:
            of.broken["voices that do not speak"].append(f"{name}: {answer}")

    def _is_whole(self, sha: str) -> bool:
        try:
            audio = self._fleet.store.read_audio(sha)
        except SourceCorruptError:
            return False
        heard = self._of.heard[self._of.number_of[sha]]
        return audio is not None and heard_in(audio).hex() == heard

    def _check_objects(self) -> None:
        """Remove what may be removed an hour later; compare rows and objects."""
        of, fleet = self._of, self._fleet
        fleet.databases.query(_LATER)
        blobs = fleet.store.blobs
        assert isinstance(blobs, BucketOwner)
        if of.epoch:  # as the documentation says of a restored catalogue
            of.counts["objects of lost commits removed"] += len(blobs.remove_strays())
        blobs.sweep()
        there = fleet.stored_objects()
        known = known_objects(fleet, of.number_of)
        of.counts["objects in the bucket"] = len(there)
        of.broken["left objects"].extend(sorted(there - known))
        of.broken["lost objects"].extend(sorted(known - there - of.brought_back))

    async def _check_copies(self) -> None:
        """Look for copies without a row; a machine recovers where one is found."""
        for machine in self._fleet.machines:
            if left := await asyncio.to_thread(self._left_copies, machine):
                self._of.counts["copies left to the next recovery"] += len(left)
                await machine.ask("recover")
            left = await asyncio.to_thread(self._left_copies, machine)
            self._of.broken["left copies"].extend(f"{machine.name}: {p}" for p in left)

    def _left_copies(self, machine: Any) -> list[Path]:
        found = self._fleet.copies(machine)
        query = "SELECT audio_sha256 || artifact FROM stored_file"
        query += " WHERE audio_sha256 = ANY(%s)"
        shas = list({path.parent.name for path in found})
        known = {key for (key,) in self._fleet.databases.query(query, shas)}
        return [path for path in found if path.parent.name + path.stem not in known]

    def _check_sums(self) -> None:
        with self._fleet.store.database.snapshot() as db:
            found = stored_files.usage_problems(db) + owners.problems(db)
        self._of.broken["wrong sums"].extend(found)

    def _check_encodes(self) -> None:
        """Count encodes of an audio beyond the first of each of its lives."""
        by_audio = defaultdict[str, list[Any]](list)
        for replica in self._fleet.replicas:
            path = Path(replica.given.directory) / "encodes"
            for line in map(json.loads, path.read_text().splitlines()):
                by_audio[line[3]].append(line)
        counts = self._of.counts
        for sha, its in by_audio.items():
            its.sort()
            encodes = [at for at, line in enumerate(its) if line[2] == "encode"]
            counts["encodes"] += len(encodes)
            for first, second in pairwise(encodes):
                between = its[first : second + 1]
                cause = self._cause(sha, between)
                if cause == AGAIN:
                    continue
                counts["double encodes"] += 1
                counts[f"double encode: {cause}"] += 1
                if cause.startswith("unexplained"):
                    shown = [line[:3] + line[4:] for line in between]
                    self._of.broken["double encodes"].append(f"{sha}: {cause} {shown}")

    def _cause(self, sha: str, its: Sequence[Any]) -> str:
        """Say why an audio was encoded twice, by what replicas noted from one to two.

        Each note is the time, the process, what it did, of which audio, and the result.
        """
        of, (begin, first, *_), (end, second, *_) = self._of, its[0], its[-1]
        ended = of.ended[sha]
        if any(begin - NOTE_SECONDS < at < end + NOTE_SECONDS for at in ended):
            return AGAIN

        def result(pid: int, what: str) -> str:
            return next((x[4] for x in reversed(its) if x[1:3] == [pid, what]), "")

        published = result(first, "publish")
        if not published:
            if of.is_excused(begin - TURN_SECONDS, end, "replica"):
                return "its replica was killed with the claim"
            if of.is_excused(begin - TURN_SECONDS, end, "database", "failover"):
                return "the claim ended, or could not be taken, in an outage"
            return "unexplained: not published"
        if published != "yes":
            why = "its audio was gone" if published == "no" else published
            return f"it was not stored: {why}"
        if (read := result(second, "read")) not in ("yes", "no", ""):
            return f"what was stored could not be read: {read}"
        if of.is_excused(begin, end, "failover to"):
            return "its row was lost in a failover"
        if sha in of.damaged or of.is_excused(begin, end, "bucket"):
            return "what was stored was not found in the bucket"
        return "unexplained: it was stored"
