"""A directory becomes a fleet's store, and one again, however often it is killed."""

import json
import random
import secrets
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import store_samples as samples
from tests.encoding_samples import make_encoding
from tests.postgres import TEMPLATE
from vllm_tts_cache.catalogue import moves
from vllm_tts_cache.catalogue.record import PREVIEW_PREFIX
from vllm_tts_cache.catalogue.row_copies import FILES, tables
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.errors import ConfigError, ObjectStoreError, StorageError
from vllm_tts_cache.store import migration
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.migration_files import stored_file_of
from vllm_tts_cache.store.opening import open_existing, open_store

NUM_VOICES = 9
NUM_FILES = 2 + NUM_VOICES * 2 + 1
NUM_KILLS = 8
# Statements and changes of the disk; a whole migration of these has 669 to 794.
STEPS = range(100, 660)


def filled(directory: Path) -> Settings:
    """A directory with all kinds of voices, and audio that is nobody's."""
    settings = Settings(samples_dir=directory)
    with closing(open_store(settings)) as store:
        recordings = [
            store.consents.add(f"Consent {n}", "de", samples.clip(100 + n), tenant)
            for n, tenant in enumerate(("default", "acme"))
        ]
        for number in range(NUM_VOICES):
            fields: dict[str, Any] = {
                "tenant": ("default", "acme")[number % 2],
                "consent": recordings[number % 2].consent_id,
                "labels": {"sex": "f", "number": str(number)},
                "ref_text": "Hello.\nIt is me." if number == 3 else f"Hello {number}.",
                "clip_starts": (0, 1_000) if number == 3 else (0,),
                "is_pinned": number == 4,
                "expires_at": time.time() + 3600 if number == 5 else None,
                "description": "Größe \N{SMILING FACE WITH OPEN MOUTH}",
            }
            samples.register(store, f"Voice {number}", number, **fields)
            assert samples.publish(store, number)
        store.register(samples.voice("Numbers", None, language="de"), None)
        preview = EncodingKey(
            audio_sha256=samples.address(0),
            encoder_fingerprint=PREVIEW_PREFIX + "a" * 64,
        )
        store.publish(preview, make_encoding(7))
        samples.register(store, "Gone", 50)
        samples.delete(store, "Gone")  # its number is not given again
        store.keep_inline(samples.clip(60))
    return settings


def contents(settings: Settings) -> dict[str, Any]:
    """Every row and every byte, but for what is of one place alone."""
    with closing(open_existing(settings)) as store:
        database = store.catalogue.database
        found: dict[str, Any] = {
            rows.table.name: list(rows.read(database)) for rows in tables()
        }
        found["files"] = [
            {
                name: value
                for name, value in row.items()
                if name not in ("id", "object_name")
            }
            for row in FILES.read(database)
        ]
        found["bytes"] = {
            (file.audio_sha256, file.kind): store.blobs.stored_bytes(file)
            for file in map(stored_file_of, FILES.read(database))
        }
        with database.read() as db:
            found["number"] = moves.last_number(db, "speaker", "generation")
        assert store.verify() == []
    return found


def move(source: Settings, target: Settings):
    report = migration.migrate(source, target, lambda *_: None)
    assert report.problems == []
    return report


@pytest.fixture
def places(tmp_path, postgres, monkeypatch):
    """Stores: one with voices, and others of which nothing is there."""
    # Who is killed leaves what it had there.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def database() -> str:
        return postgres.make(f"moved_{secrets.token_hex(6)}", TEMPLATE)

    def fleet(name: str = "fleet") -> Settings:
        return Settings(
            samples_dir=tmp_path / f"copies-of-{name}",
            catalogue_url=database(),
            store_url=f"file://{tmp_path}/{name}",
        )

    def shared(name: str = "shared") -> Settings:
        return Settings(samples_dir=tmp_path / name, catalogue_url=database())

    return SimpleNamespace(
        full=filled(tmp_path / "full"),
        directory=lambda name="back": Settings(samples_dir=tmp_path / name),
        fleet=fleet,
        shared=shared,
    )


def arguments(source: Settings, target: Settings) -> list[str]:
    given = ["migrate"]
    for option, place in (("--from", source), ("--to", target)):
        store = place.store_url or str(place.samples_dir)
        if place.catalogue_url:
            given += [option, place.catalogue_url, f"{option}-store", store]
        else:
            given += [option, store]
    return given


def run(
    steps: int, *given: str, by: int = signal.SIGKILL
) -> "subprocess.CompletedProcess[str]":
    how = [str(steps), str(int(by))]
    return subprocess.run(
        [sys.executable, "-m", "tests.fault.migrating", *how, *given],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_and_back_every_row_and_every_byte_is_the_same(places):
    before = contents(places.full)
    there = [places.fleet(), places.shared()]
    for here, to in zip([places.full, there[0]], there, strict=True):
        report = move(here, to)
        assert (report.num_voices, report.num_consents) == (NUM_VOICES + 1, 2)
        assert report.num_copied == report.num_files == NUM_FILES
        assert contents(to) == before
    move(there[1], places.directory())
    assert contents(places.directory()) == before
    with closing(open_store(places.directory())) as store:
        made = samples.register(store, "New", 70).record
        assert made.generation > before["number"]
        assert not store.has_audio(samples.address(60))  # inline


def test_the_source_is_not_written_to(places):
    root = places.full.samples_dir
    before = {p: p.read_bytes() for p in root.rglob("*.safetensors")}
    names = {path for path in root.rglob("*") if path.suffix not in ("", ".sqlite3")}
    move(places.full, places.fleet())
    assert {p: p.read_bytes() for p in root.rglob("*.safetensors")} == before
    left = {path for path in root.rglob("*") if path.suffix not in ("", ".sqlite3")}
    assert {path for path in left ^ names if "sqlite3-" not in path.name} == set()


def test_one_that_was_done_says_so_and_changes_nothing(places):
    fleet = places.fleet()
    move(places.full, fleet)
    with closing(open_store(fleet)) as store:
        samples.register(store, "Later", 80)
    report = move(places.full, fleet)
    assert report.was_done and report.num_copied == 0
    with closing(open_store(fleet)) as store:
        assert store.find("Later") is not None


@pytest.mark.parametrize("way", ("to_fleet", "to_shared", "to_directory"))
def test_killed_anywhere_it_goes_on_and_loses_nothing(places, way):
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")  # noqa: T201  shown where it fails
    chance = random.Random(seed)
    source = places.full
    if way == "to_directory":
        source = places.fleet("first")
        move(places.full, source)
    target = {"to_fleet": places.fleet, "to_shared": places.shared}.get(
        way, places.directory
    )()
    before = contents(source)
    given, num_killed = arguments(source, target), 0
    for _ in range(NUM_KILLS):
        done = run(chance.choice(STEPS), *given)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        num_killed += 1
    done = run(0, *given, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
    assert contents(target) == before
    assert num_killed
    with closing(open_store(target)) as store:
        store.sweep()
        assert store.verify() == []


@pytest.mark.parametrize("steps", (150, 350, 550))
def test_interrupted_it_says_so_and_goes_on_when_it_is_run_again(places, steps):
    source, target = places.full, places.fleet()
    before = contents(source)
    given = arguments(source, target)
    cut = run(steps, *given, by=signal.SIGINT)
    assert cut.returncode == 130, cut.stderr
    assert "Traceback" not in cut.stderr
    done = run(0, *given, "--json")
    assert done.returncode == 0, done.stderr
    assert contents(target) == before


def half_done(source: Settings, target: Settings) -> None:
    """Stopped while it copies."""

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("comparing"):
            raise StorageError("stopped")

    with pytest.raises(StorageError, match="stopped"):
        migration.migrate(source, target, stop)


def test_what_is_half_done_is_opened_by_no_server_and_by_no_other_migration(
    places, tmp_path
):
    fleet = places.fleet()
    half_done(places.full, fleet)
    for open_ in (open_store, open_existing):
        with pytest.raises(ConfigError, match="only a part"):
            open_(fleet)
    other = filled(tmp_path / "other")
    with pytest.raises(ConfigError, match="which is not"):
        move(other, fleet)
    with pytest.raises(ConfigError, match="only a part"):
        move(fleet, places.directory())
    report = move(places.full, fleet)
    assert report.num_copied == 0
    assert contents(fleet) == contents(places.full)


def test_what_changed_in_the_source_since_it_was_stopped_changes_in_the_copy(places):
    fleet = places.fleet()
    half_done(places.full, fleet)
    with closing(open_store(places.full)) as store:
        samples.delete(store, "Voice 0")
        replaced = samples.register(store, "Voice 2", 90).deletion
        assert replaced is not None
        store.remove_files(replaced)
        store.publish(samples.key(4), make_encoding(44))
        samples.register(store, "Voice 0", 91)
    move(places.full, fleet)
    assert contents(fleet) == contents(places.full)


@pytest.mark.parametrize("end", ("source", "target"))
@pytest.mark.parametrize("kind", ("directory", "fleet"))
def test_one_that_a_server_has_open_is_refused(places, end, kind):
    used, other = getattr(places, kind)("used"), places.directory("other")
    if end == "source":
        move(places.full, used)
    with closing(open_store(used)) as server:
        server.join()
        source, target = (used, other) if end == "source" else (places.full, used)
        with pytest.raises(ConfigError, match="is in use"):
            move(source, target)
    move(source, target)


def test_a_source_that_a_server_opens_meanwhile_is_to_be_compared_again(places):
    with closing(open_store(places.full)) as server:
        report = migration.migrate(
            places.full, places.directory(), lambda *_: server.join()
        )
        assert report.problems == ["a server has been started on the source"]
    move(places.full, places.directory())


@pytest.mark.parametrize("kind", ("directory", "fleet", "shared"))
def test_one_that_has_voices_is_refused_and_stays_as_it_is(places, kind):
    target = getattr(places, kind)("used")
    with closing(open_store(target)) as store:
        samples.register(store, "Ann", 0)
    before = contents(target)
    with pytest.raises(ConfigError, match="is not empty"):
        move(places.full, target)
    assert contents(target) == before


def test_a_directory_of_something_else_is_refused_and_stays_as_it_is(places, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("Dear Ann")
    with pytest.raises(ConfigError, match="something else"):
        move(places.full, places.directory("home"))
    assert [path.name for path in home.iterdir()] == ["letter.txt"]


def test_a_bucket_of_another_catalogue_is_refused_and_stays_as_it_is(places):
    foreign = places.fleet("bucket")
    with closing(open_store(foreign)) as store:
        samples.register(store, "Ann", 0)
    before = contents(foreign)
    with pytest.raises(ConfigError, match="of another voice catalogue"):
        move(places.full, places.fleet("bucket"))
    assert contents(foreign) == before


def test_a_store_is_not_migrated_into_itself(places):
    with pytest.raises(ConfigError, match="the same store"):
        move(places.full, places.full)


def test_unfinished_deletions_are_to_be_finished_first(places):
    with closing(open_store(places.full)) as store:
        deletion = store.delete("Voice 0")
    with pytest.raises(ConfigError, match="vllm-tts-cache gc"):
        move(places.full, places.fleet())
    with closing(open_store(places.full)) as store:
        store.remove_files(deletion)
    move(places.full, places.fleet("another"))


def test_damaged_audio_is_copied_nowhere(places):
    with closing(open_store(places.full)) as store:
        path = Path(store.files.file_name(samples.address(1), "audio"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StorageError, match="is damaged"):
        move(places.full, places.fleet())
    assert path.read_bytes() != data  # nor set aside


@pytest.mark.parametrize("kind", ("fleet", "directory"))
def test_a_copy_that_differs_is_not_opened(places, kind):
    target = getattr(places, kind)("copy")
    half_done(places.full, target)
    root = (
        Path(target.store_url.removeprefix("file://"))
        if target.store_url
        else target.samples_dir / "store"
    )
    audio = next(path for path in root.rglob("*") if path.stat().st_size > 5_000)
    audio.write_bytes(audio.read_bytes()[:-1] + b"?")
    report = migration.migrate(places.full, target, lambda *_: None)
    assert any("differs" in line for line in report.problems)
    with pytest.raises(ConfigError, match="only a part"):
        open_store(target)
    assert move(places.full, target).num_copied == 1
    assert contents(target) == contents(places.full)


def test_an_object_store_that_stops_is_gone_on_with(places, object_server, monkeypatch):
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    url = object_server.url(secrets.token_hex(6))
    fleet = replace(places.fleet(), store_url=url)

    def stop(what: str, *_: int) -> None:
        if what == "copying speaker":
            object_server.stop()

    try:
        with pytest.raises(ObjectStoreError):
            migration.migrate(places.full, fleet, stop)
    finally:
        object_server.start()
    assert move(places.full, fleet).num_copied == 0
    assert contents(fleet) == contents(places.full)


def test_two_at_once_do_not_fill_one_store(places):
    for target in (places.fleet(), places.directory("two")):

        def again(*_: Any, target: Settings = target) -> None:
            with pytest.raises(ConfigError, match=r"Another process|in use"):
                migration.migrate(places.full, target, lambda *_: None)

        assert migration.migrate(places.full, target, again).problems == []


def test_the_command_shows_no_password_and_says_what_it_did(places, capsys):
    fleet = places.fleet()
    assert "s3cret" in fleet.catalogue_url
    assert main([*arguments(places.full, fleet), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["voices"] == NUM_VOICES + 1
    assert found["copied_files"] == found["files"] == NUM_FILES
    assert main(arguments(fleet, places.directory())) == 0
    assert main(arguments(places.full, places.fleet("fleet"))) == 2
    more = capsys.readouterr()
    assert "all equal" in more.out
    assert "another voice catalogue" in more.err
    assert "s3cret" not in printed.out + printed.err + more.out + more.err


def test_the_environment_says_what_is_not_given(places, monkeypatch, capsys):
    fleet = places.fleet()
    monkeypatch.setenv("SPEAKER_CATALOGUE_URL", fleet.catalogue_url)
    monkeypatch.setenv("SPEAKER_STORE_URL", fleet.store_url)
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(fleet.samples_dir))
    assert main(["migrate", "--from", str(places.full.samples_dir)]) == 0
    assert contents(fleet) == contents(places.full)
    assert main(["migrate"]) == 2
    assert "--from, --to or both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    (
        (["--from", "/a", "--from-store", "s3://b"], "--from-store"),
        (["--from", "postgresql://u:s3cret@h/d", "--to", "/a"], "--from-store"),
        (["--from", "mysql://u:s3cret@h/d", "--to", "/a"], "not shown"),
        (["--from", "/a", "--to-store", "s3://b/c"], "--to is not"),
        (["--from", "/none/such", "--to", "/none/other"], "no server"),
    ),
)
def test_what_is_no_place_is_said_so(given, said, capsys):
    assert main(["migrate", *given]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert "s3cret" not in complaint
