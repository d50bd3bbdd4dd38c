"""``vllm-tts-cache doctor``: what it says of machines that have something."""

import json
from dataclasses import replace

import pytest

from tests.cli_runs import run
from tests.speaking import wav
from tests.speech_server import Server, listening, running
from vllm_tts_cache import files
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.cli import common, doctor, main
from vllm_tts_cache.store.opening import open_store

SLOW = (
    ("_SLOW_SYNC_MS", "fsync"),
    ("_SLOW_LOOK_MS", "catalogue"),
    ("_SLOW_HTTP_LOOK_MS", "server"),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nothing is slow, however busy this machine is."""
    for name, _ in SLOW:
        monkeypatch.setattr(doctor, name, float("inf"))


def by_name(findings):
    return {each.name: each for each in findings}


@pytest.fixture
def settings(tmp_path):
    settings = Settings(
        samples_dir=tmp_path / "speakers",
        # Budgets that this disk has room for.
        disk_max_bytes=1,
        audio_max_bytes=1,
        inline_audio_max_bytes=1,
    )
    open_store(settings).close()
    return settings


def test_this_environment_is_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "speakers"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("SPEAKER_URL", raising=False)
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    names = {check["name"] for check in found["checks"]}
    assert {"python", "vllm", "vllm-omni", "torch", "entry points", "space"} <= names
    assert {check["status"] for check in found["checks"]} <= {"ok", "warn"}
    assert all(check["hint"] for check in found["checks"] if check["status"] != "ok")


@pytest.mark.long  # 15 s; each server of tests/e2e imports the same
def test_what_is_installed_can_be_imported_together():
    found = by_name(doctor.processors())
    assert found["wheels"].status == "ok"
    assert "torch" in found["wheels"].text
    assert found["GPU"].status == "ok"


@pytest.mark.parametrize(
    ("environ", "name", "status"),
    (
        ({}, "VLLM_PLUGINS", "ok"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "fail"),
        ({"VLLM_PLUGINS": "tts_cache,tts_cache_cpu"}, "VLLM_PLUGINS", "fail"),
        (
            {"VLLM_PLUGINS": "tts_cache,tts_cache_cpu,vllm_omni_register_models"},
            "VLLM_PLUGINS",
            "ok",
        ),
        ({"SPEAKER_CACHE_ENABLED": "0"}, "settings", "warn"),
        ({"SPEAKER_CACHE_MAX_BITES": "1"}, "settings", "fail"),
        ({"SPEAKER_TENANT_FILE": "keys.yaml"}, "settings", "warn"),
        ({"SPEAKER_URL": "http://a", "SPEAKER_MODEL": "b"}, "settings", "ok"),
    ),
)
def test_what_keeps_vllm_from_loading_us_is_said(environ, name, status):
    assert by_name(doctor.plugins(environ))[name].status == status


def test_a_healthy_directory_is_ok_and_looked_into(settings):
    found = by_name(doctor.storage(settings))
    assert {each.status for each in found.values()} == {"ok"}, found
    assert "0 voices, 0 API servers" in found["catalogue"].text
    assert list(settings.samples_dir.glob(".partial-*")) == []


@pytest.mark.parametrize(("name", "check"), SLOW[:2])
def test_what_is_slow_is_a_warning(settings, monkeypatch, name, check):
    monkeypatch.setattr(doctor, name, 0.0)
    found = by_name(doctor.storage(settings))
    slow = {each for each, finding in found.items() if finding.status == "warn"}
    assert slow == {check}


def test_a_directory_that_others_can_read_is_a_warning(settings):
    settings.samples_dir.chmod(0o755)
    found = by_name(doctor.storage(settings))["directory"]
    assert (found.status, "chmod 700" in found.hint) == ("warn", True)


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    settings = Settings(samples_dir=tmp_path / "a" / "b")
    found = by_name(doctor.storage(settings))
    assert found["directory"].status == "ok"
    assert "fsync" not in found
    assert not (tmp_path / "a").exists()


def test_a_file_in_its_place_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("x")
    found = by_name(doctor.storage(Settings(samples_dir=tmp_path / "file")))
    assert found["directory"].status == "fail"


def test_budgets_that_the_disk_has_no_room_for_are_a_warning(settings):
    larger = replace(settings, disk_max_bytes=1 << 60)
    assert by_name(doctor.storage(larger))["space"].status == "warn"


def test_a_file_system_of_several_hosts_is_a_warning(settings, monkeypatch):
    number = 0x01021994  # tmpfs stands for NFS
    kinds = {number: "NFS", 0xEF53: "NFS", 0x794C7630: "NFS", 0x9123683E: "NFS"}
    monkeypatch.setattr(files, "_SHARED_FILE_SYSTEMS", kinds)
    if files.shared_file_system(settings.samples_dir) is None:
        pytest.skip("this file system is none that the test knows")
    assert by_name(doctor.storage(settings))["file system"].status == "warn"


def test_a_catalogue_of_another_version_is_a_failure(settings):
    (settings.samples_dir / "catalogue.sqlite3").write_bytes(b"no database at all")
    assert by_name(doctor.storage(settings))["catalogue"].status == "fail"


def test_the_file_of_tenants_is_read_as_a_server_reads_it(settings, tmp_path):
    assert list(doctor.tenants(settings)) == []
    path = tmp_path / "tenants.json"
    path.write_text('{"tenants": [{"name": "acme", "keys": ["0123456789abcdef"]}]}')
    given = replace(settings, tenants_file=path)
    for mode, status in ((0o600, "ok"), (0o604, "warn")):
        path.chmod(mode)
        (found,) = doctor.tenants(given)
        assert (found.status, "1 tenants" in found.text) == (status, True)
    path.write_text('{"tenants": [{"name": "acme"}]}')
    (found,) = doctor.tenants(given)
    assert found.status == "fail" and "$.tenants[0]" in found.text


async def test_ours_is_known_from_others(default_checkpoint, tmp_path, monkeypatch):
    made = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    async with running(made) as served, listening(served.app) as port:
        url = f"http://127.0.0.1:{port}"
        found = await run("doctor", "--quick", "--json", url=url)
        people = await run("doctor", "--quick", url=url)
        monkeypatch.setattr(doctor, "_SLOW_HTTP_LOOK_MS", 0.0)
        slow = await run("doctor", "--quick", url=url)
        await served.register("Ann", wav())
        monkeypatch.setattr(common, "DEFAULT_URL", url)
        lost = await run("doctor", "--quick", "--directory", tmp_path / "none")
    told = {check["name"]: check for check in found.json["checks"]}
    assert told["server"]["status"] == "ok"
    assert "0 voices, 1 workers" in told["server"]["text"]
    assert "1 API servers at work" in told["catalogue"]["text"]
    assert {found.status, people.status, slow.status, lost.status} == {0}
    assert "ok    server" in people.out and "\x1b" not in people.out
    assert "warn  server" in slow.out
    assert f"its voices are not in {tmp_path / 'none'}" in lost.out


async def test_a_server_that_was_named_and_does_not_answer_is_a_failure(tmp_path):
    nowhere = "http://127.0.0.1:9"
    done = await run("doctor", "--quick", "--directory", tmp_path, url=nowhere)
    assert done.status == 1
    assert "fail  server" in done.out


async def test_another_kind_of_server_is_a_failure(tmp_path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b'{"detail": "Not Found"}'})

    async with listening(app) as port:
        done = await run("doctor", "--quick", "--json", url=f"http://127.0.0.1:{port}")
    [check] = [each for each in done.json["checks"] if each["name"] == "server"]
    assert (done.status, check["status"]) == (1, "fail")
    assert "no voices routes" in check["text"]
