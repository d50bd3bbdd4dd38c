"""A mixed load on servers behind nginx, which are restarted in turn."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median, quantiles

import httpx

from benchmarks.bench import clip
from benchmarks.sides import Side
from vllm_tts_cache.testing.client import SpeechClient, data_url

NUM_CLIENTS = 4
NUM_VOICES = 6
PAUSE_SECONDS = 30.0  # between the end of one restart and the next
TEXTS = ("Number one.", "Number two, said again.", "Three.")
NO_VOICE = 400
# What a server had taken is seen to fail a little after it is gone.
AFTER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Done:
    """One thing that a client did, and why it failed; empty if it did not."""

    what: str
    began: float
    ended: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """From when a server was told to stop, when it was gone, and when it was back."""

    began: float
    gone: float
    back: float


class Soak:
    """One run.

    Args:
        servers: They share voices.
        url: Where requests are passed on to them in turns.
    """

    def __init__(self, servers: Sequence[Side], url: str):
        self._servers, self._url = servers, url
        self._ended = threading.Event()
        self._done: list[Done] = []
        self._restarts: list[Restart] = []
        self._heard: dict[tuple[str, str], bytes] = {}
        self._began = 0.0

    def run(self, seconds: float) -> Iterator[str]:
        """Load them for so long; yields what came of it, a line each."""
        with closing(SpeechClient(self._url)) as client:
            for number in range(NUM_VOICES):
                self._register(client, f"soak-{number}", 1000 + number)
        threads = [
            threading.Thread(target=self._drive, args=(number,))
            for number in range(NUM_CLIENTS)
        ]
        self._began = time.monotonic()
        until = self._began + seconds
        for thread in threads:
            thread.start()
        try:
            self._restart_in_turn(until)
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()
        yield from self._told(seconds)

    def _restart_in_turn(self, until: float) -> None:
        number = 0
        while True:
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() > until:
                return
            side = self._servers[number % len(self._servers)]
            began = time.monotonic()
            side.stop()
            gone = time.monotonic()
            side.restart()
            self._restarts.append(Restart(began, gone, time.monotonic()))
            number += 1

    def _drive(self, number: int) -> None:
        chance = random.Random(number)
        acts: dict[Callable[[SpeechClient, random.Random], str], int] = {
            self._speak: 60,
            self._speak_inline: 10,
            self._live_and_die: 15,
            self._list: 15,
        }
        with closing(SpeechClient(self._url)) as client:
            while not self._ended.is_set():
                (act,) = chance.choices(list(acts), weights=list(acts.values()))
                began = time.monotonic()
                try:
                    failure = act(client, chance)
                except httpx.HTTPError as exc:
                    failure = f"{type(exc).__name__}: {exc}"
                what = act.__name__.strip("_")
                self._done.append(Done(what, began, time.monotonic(), failure))

    def _speak(self, client: SpeechClient, chance: random.Random) -> str:
        voice, text = f"soak-{chance.randrange(NUM_VOICES)}", chance.choice(TEXTS)
        spoken = client.speak(text, voice=voice)
        if spoken.status != httpx.codes.OK:
            return f"{spoken.status} {spoken.audio[:200]!r}"
        heard = self._heard.setdefault((voice, text), spoken.audio)
        return "" if heard == spoken.audio else f"{voice} sounded otherwise"

    def _speak_inline(self, client: SpeechClient, chance: random.Random) -> str:
        sample = data_url(clip(2.0, 2000 + chance.randrange(20)))
        spoken = client.speak(ref_audio=sample, x_vector_only_mode=True)
        is_well = spoken.status == httpx.codes.OK
        return "" if is_well else f"{spoken.status} {spoken.audio[:200]!r}"

    def _live_and_die(self, client: SpeechClient, chance: random.Random) -> str:
        name = f"brief-{chance.randrange(10**9)}"
        self._register(client, name, chance.randrange(10**6))
        spoken = client.speak(TEXTS[0], voice=name)
        if spoken.status != httpx.codes.OK:
            return f"{spoken.status} {spoken.audio[:200]!r}"
        answer = client.http.delete(f"/v1/audio/voices/{name}")
        if answer.status_code != httpx.codes.OK:
            return f"DELETE: {answer.status_code} {answer.text[:200]}"
        after = client.speak(TEXTS[0], voice=name).status
        return "" if after == NO_VOICE else f"spoken after its end: {after}"

    def _list(self, client: SpeechClient, _: random.Random) -> str:
        page = client.http.get("/v1/audio/voices", params={"search": "soak"})
        page.raise_for_status()
        there = {voice["name"] for voice in page.json()["uploaded_voices"]}
        missing = {f"soak-{number}" for number in range(NUM_VOICES)} - there
        return f"missing: {sorted(missing)}" if missing else ""

    def _register(self, client: SpeechClient, name: str, seed: int) -> None:
        *_, fields = self._servers[0].model.modes.values()
        client.register(name, clip(2.0, seed), **fields).raise_for_status()

    def _told(self, seconds: float) -> Iterator[str]:
        yield (
            f"{seconds / 60:.0f} min, {NUM_CLIENTS} clients, {len(self._done)} things"
            f" done, {len(self._restarts)} restarts"
        )
        for what, num in sorted(Counter(each.what for each in self._done).items()):
            times = [e.ended - e.began for e in self._done if e.what == what]
            last = quantiles(times, n=100)[98] if len(times) > 1 else times[0]
            yield f"  {what}: {num}, p50 {median(times):.2f} s, p99 {last:.2f} s"
        for each in self._restarts:
            took, back = each.gone - each.began, each.back - each.gone
            yield (
                f"  restart at {each.began - self._began:.0f} s: {took:.1f} s to end,"
                f" {back:.0f} s until it was back"
            )
        failed = [each for each in self._done if each.failure]
        taken = [each for each in failed if self._was_taken(each)]
        yield f"{len(failed)} failed, {len(taken)} of them at a server that stopped"
        for each in failed:
            why = "taken" if each in taken else "OTHERWISE"
            span = f"{each.began - self._began:.1f}-{each.ended - self._began:.1f} s"
            yield f"  {why}: {span}: {each.what}: {each.failure}"

    def _was_taken(self, done: Done) -> bool:
        return any(
            done.began <= restart.gone and done.ended >= restart.began
            for restart in self._restarts
            if done.ended <= restart.gone + AFTER_SECONDS
        )
