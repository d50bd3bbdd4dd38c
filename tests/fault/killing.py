"""A process that does what servers and workers do, and is killed in the middle of it.

What it has been promised it writes down, a line before each operation and one when the
operation has returned; the parent reads these after the kill and knows what must hold.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine, event

from tests import store_samples
from tests.store_samples import address, clip, key, opened, publish, register, traces
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.store.speaker_store import SpeakerStore

NAMES = ("ann", "bob", "cid")
REGISTERED_CLIPS = range(6)  # some of them come inline as well
INLINE_CLIPS = range(4, 9)
ENCODERS = "ef"
BUDGETS = {
    "inline_audio_max_bytes": 25_000,  # two and a half clips
    "disk_max_bytes": 1 << 20,
    "inline_share": 0.001,  # three encodings
}
HUNG_SECONDS = 60
# Steps that touch the disk: a kill falls between any two of them.
_STEPS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open", "os.chmod"}


def open_here(directory: Path) -> SpeakerStore:
    return opened(directory, **BUDGETS)


@dataclass
class Promised:
    """What a reader of the journal knows to hold.

    ``voices``: which clips a name may have now, several while in doubt; None for no
    voice. ``encodings``: published (clip, encoder) of voices that nobody touched since.
    """

    voices: dict[str, set[int | None]] = field(
        default_factory=lambda: {name: {None} for name in NAMES}
    )
    encodings: set[tuple[int, str]] = field(default_factory=set)

    def learn(self, lines: list[str]) -> None:
        for line in lines:
            what, *words = line.split()
            getattr(self, f"_{what}")(*words)

    def _opened(self) -> None:
        pass

    def _registering(self, name: str, number: str) -> None:
        self._let_go(name)
        self.voices[name] = self.voices[name] | {int(number)}

    def _registered(self, name: str, number: str) -> None:
        self.voices[name] = {int(number)}

    def _deleting(self, name: str) -> None:
        self._let_go(name)
        self.voices[name] = self.voices[name] | {None}

    def _deleted(self, name: str) -> None:
        self.voices[name] = {None}

    def _published(self, number: str, encoder: str) -> None:
        held = [clips for clips in self.voices.values() if clips == {int(number)}]
        if held:
            self.encodings.add((int(number), encoder))

    def _let_go(self, name: str) -> None:
        gone = self.voices[name]
        self.encodings = {(n, e) for n, e in self.encodings if n not in gone}


def killed(directory: Path, seed: int) -> list[str]:
    """Let a child work until it is killed; return what it wrote down."""
    chance = random.Random(seed)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _end_if_hung()
        try:
            os.close(reader)
            _work(directory, seed, chance, writer)
        except BaseException as exc:  # noqa: BLE001  the parent has to hear of it
            os.write(writer, f"failed {exc!r}\n".replace("\n", " ").encode() + b"\n")
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as journal:
        text = b""
        if seed % 2:  # at a moment; else the child counts its steps and kills itself
            if chance.random() < 0.7:
                text = journal.readline()
            time.sleep(chance.uniform(0.0, 0.15))
            os.kill(child, signal.SIGKILL)
        text = (text + journal.read()).decode()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {text}"
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    return lines


def main(directory: str, first_seed: str, num_kills: str, *urls: str) -> None:
    """Kill a store with a bucket again and again; ends well if it stays whole.

    A program of its own: obstore's threads survive no fork, so that only children of a
    process that has used no bucket can use one, and the one that forks them may not.
    """
    store_samples.catalogue_url_of = lambda _directory: urls[0]
    store_samples.store_url_of = lambda _directory: urls[1]
    promised = Promised()
    for seed in range(int(first_seed), int(first_seed) + int(num_kills)):
        lines = killed(Path(directory), seed)
        assert not any(line.startswith("failed") for line in lines), (seed, lines)
        promised.learn(lines)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
            voices = child.submit(_checked, Path(directory), promised).result(60)
        promised.voices = voices


def _checked(directory: Path, promised: Promised) -> dict[str, set[int | None]]:
    check(directory, promised)
    return promised.voices


def check(directory: Path, promised: Promised) -> None:
    """Open what is left, recover, and hold it against what was promised."""
    store = open_here(directory)
    try:
        store.recover()
        assert store.verify() == []
        for name, allowed in promised.voices.items():
            found = store.find(name)
            sha = None if found is None else found.record.audio_sha256
            fits = {n for n in allowed if (None if n is None else address(n)) == sha}
            assert fits, f"{name}: {sha}, allowed are {allowed}"
            promised.voices[name] = fits
            if sha is not None:
                assert store.read_audio(sha) is not None
        for number, encoder in promised.encodings:
            if any(clips == {number} for clips in promised.voices.values()):
                assert store.read(key(number, encoder)) is not None, (number, encoder)
        _nothing_of_the_deleted(directory, promised)
    finally:
        store.close()


def _nothing_of_the_deleted(directory: Path, promised: Promised) -> None:
    had = {n for clips in promised.voices.values() for n in clips}
    for number in REGISTERED_CLIPS:
        if number not in had and number not in INLINE_CLIPS:
            assert traces(directory, address(number)) == [], f"clip {number} is left"


def _work(directory: Path, seed: int, chance: random.Random, writer: int) -> None:
    def note(line: str) -> None:
        os.write(writer, f"{line}\n".encode())

    counts = not seed % 2
    opens = chance.random() < 0.3
    if counts and opens:
        die_after(chance.randrange(1, 150))
    store = open_here(directory)
    store.participants.join()
    note("opened")
    if counts and not opens:
        die_after(chance.randrange(1, 250))
    while True:
        _operate(store, chance, note)


def _operate(store: SpeakerStore, chance: random.Random, note) -> None:
    name = chance.choice(NAMES)
    what = chance.choice(
        ["register", "delete", "keep", "publish", "publish", "recover"]
    )
    if what == "register":
        number = chance.choice(REGISTERED_CLIPS)
        note(f"registering {name} {number}")
        done = register(store, name, number)
        note(f"registered {name} {number}")
        if done.deletion is not None:
            store.remove_files(done.deletion)
            confirm_all(store)
    elif what == "delete" and store.find(name) is not None:
        note(f"deleting {name}")
        deletion = store.registrations.delete(name)
        note(f"deleted {name}")
        carry_out(store, deletion)
    elif what == "keep":
        store.store_inline(clip(chance.choice(INLINE_CLIPS)))
    elif what == "publish":
        number = chance.choice([*REGISTERED_CLIPS, *INLINE_CLIPS])
        encoder = chance.choice(ENCODERS)
        if publish(store, number, encoder):
            note(f"published {number} {encoder}")
    elif what == "recover" and chance.random() < 0.2:
        store.recover()


def carry_out(store: SpeakerStore, deletion: Deletion) -> None:
    """What a server does of a DELETE once the row is gone."""
    store.remove_files(deletion)
    confirm_all(store)
    store.acknowledge(deletion.id)


def confirm_all(store: SpeakerStore) -> None:
    for deletion in store.participants.deletions_to_confirm():
        store.participants.confirm(deletion.id)


def killed_deleting(
    directory: Path, delete: Callable[[SpeakerStore], Deletion], num_steps: int
) -> bool:
    """Let a child be a server that deletes something; whether it was killed meanwhile.

    It is killed at that step, of those that write a file or talk to the catalogue.
    """
    if (child := os.fork()) == 0:
        _end_if_hung()
        try:
            store = open_here(directory)
            store.participants.join()
            die_after(num_steps)
            carry_out(store, delete(store))
        except BaseException:  # noqa: BLE001  the parent has to hear of it
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL, signal.SIGALRM)
    return status != 0


def _end_if_hung() -> None:
    """Have a child killed as well that waits for ever, for what a lost thread held."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HUNG_SECONDS)


def die_after(num_steps: int) -> None:
    left = num_steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, _: tuple[object, ...]) -> None:
        if name in _STEPS:
            step()

    sys.addaudithook(hook)
    for moment in ("before_cursor_execute", "commit"):
        event.listen(Engine, moment, lambda *_: step())


if __name__ == "__main__":
    main(*sys.argv[1:])
