"""The command line in shells, locales and containers as people have them."""

import asyncio
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runs import MAIN, OURS, run
from tests.speech_server import Server, listening, running
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.testing.clips import SPEECH

DOWN = "http://127.0.0.1:9"
V6 = "http://[::1]:9"
NAME = "小明 é"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
GONE: Any = None  # a variable that is not set
# What changes nothing for a server on this machine.
ENVIRONMENTS = {
    "socks": {"ALL_PROXY": "socks5://127.0.0.1:9"},
    "socks, left out": {"all_proxy": "socks5://x:9", "no_proxy": "127.0.0.1"},
    "socks, [::1] left out": {"ALL_PROXY": "socks5://x:9", "NO_PROXY": "a,[::1]"},
    "proxy that is down": {"HTTP_PROXY": DOWN, "http_proxy": DOWN},
    "proxy that is none": {"HTTP_PROXY": "what://[", "NO_PROXY": "[::1, [, :"},
    "no certificates": {"SSL_CERT_FILE": "/nonexistent", "SSLKEYLOGFILE": "/a/b"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": ASCII,
    "no such locale": {"LC_ALL": "xx_XX.none", "LANG": "\udced", "TZ": "none"},
    "no such places": {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "TERM": "x"},
    "nothing": {"HOME": GONE, "PATH": GONE, "LANG": GONE, "COLUMNS": "0"},
}
LOOKING = (("ls", "--search", "小"), ("doctor", "--quick"))
EVERYTHING = (
    (("show", NAME), 0),
    (("ls", "--json"), 0),
    (("try", NAME, "Grüß Gott 😀", "--model", "m"), 0),
    (("check", "小.flac"), 0),
    (("add", "ö", "小.flac", "--consent", "ä", "--ref-text", "Grüße."), 0),
    (("warm", NAME), 0),
    (("export", NAME, "--out", "saved"), 1),  # no file can be called so
    (("import", "小.voice"), 0),
    (("edit", NAME, "--description", "ü", "--label", "é:ü"), 0),
    (("rm", "ö"), 0),
    (("rm", "ß", "--yes"), 4),
    (("show", "ß"), 4),
)


def environ_of(given, folder):
    environ = {name: text for name, text in os.environ.items() if name not in OURS}
    environ = {**environ, "SPEAKER_SAMPLES_DIR": str(folder / "speakers"), **given}
    return {name: text for name, text in environ.items() if text is not GONE}


# Commands one after another: an interpreter takes longer to start than each.
SEVERAL = """
import sys
from vllm_tts_cache.entrypoints.cli import main
commands, statuses = [[]], []
for word in sys.argv[1:]:
    commands.append([]) if word == ";" else commands[-1].append(word)
for command in commands:
    statuses.append(main(command))
print(*statuses, file=sys.stderr)
"""


def called(arguments, environ, folder, program=MAIN, **options):
    if arguments[0] not in ("doctor", "voices"):
        arguments = ("voices", *arguments)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environ_of(environ, folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
        check=False,
        **options,
    )


def ran(command, given, folder):
    environ = environ_of(given, folder)
    return subprocess.run(command, capture_output=True, check=False, env=environ)


def what_is_wrong(done, status):
    """Why a command that ended so is not what somebody may expect; None if it is."""
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == status and "Traceback" not in said:
        return None
    return f"status {done.returncode}, not {status}: {said}"


@pytest.fixture
async def url(default_checkpoint, tmp_path, monkeypatch):
    """A server that has a voice whose name few encodings can write."""
    (tmp_path / "小.flac").write_bytes(SPEECH.path.read_bytes())
    made = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    async with running(made) as server, listening(server.app) as port:
        answer = await server.register(NAME, SPEECH.path.read_bytes())
        answer.raise_for_status()
        path = f"/v1/audio/voices/{answer.json()['id']}/bundle"
        bundle = await server.client.get(path)
        (tmp_path / "小.voice").write_bytes(bundle.content)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.long
async def test_no_environment_keeps_a_command_from_a_server_here(url, tmp_path):
    # In turns: a doctor imports more than the others.
    runs = [(name, LOOKING[n % 2]) for n, name in enumerate(ENVIRONMENTS)]
    turns = asyncio.Semaphore(2)

    async def wrong(name, arguments):
        async with turns:
            given = {**ENVIRONMENTS[name], "SPEAKER_URL": url}
            done = await asyncio.to_thread(called, arguments, given, tmp_path)
        return what_is_wrong(done, 0)

    found = await asyncio.gather(*(wrong(*each) for each in runs))
    assert [pair for pair in zip(runs, found, strict=True) if pair[1]] == []


async def all_called(commands, environ, folder):
    """The status of each."""
    words = [word for each in commands for word in (";", "voices", *each)][1:]
    done = await asyncio.to_thread(called, words, environ, folder, SEVERAL)
    assert what_is_wrong(done, 0) is None
    return [int(word) for word in done.stderr.splitlines()[-1].split()]


@pytest.mark.slow
async def test_commands_take_and_print_what_the_locale_does_not_know(url, tmp_path):
    commands = [arguments for arguments, _ in EVERYTHING]
    done = await all_called(commands, {**ASCII, "SPEAKER_URL": url}, tmp_path)
    assert done == [status for _, status in EVERYTHING]


async def test_a_name_that_the_locale_does_not_know_is_spelt_out(url, tmp_path):
    for given, shown in (
        (ASCII, "\\u5c0f\\u660e \\xe9"),
        ({"PYTHONIOENCODING": "cp1252"}, "\\u5c0f\\u660e \\xe9"),
        ({"PYTHONIOENCODING": "utf-8"}, NAME),
    ):
        environ = {**given, "SPEAKER_URL": url}
        done = await asyncio.to_thread(called, ("show", NAME), environ, tmp_path)
        encoding = given.get("PYTHONIOENCODING", "ascii")
        said = done.stdout.decode(encoding).replace("é", "\\xe9")
        assert shown.replace("é", "\\xe9") in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    (
        (("show", "a\udced"), "NAME"),
        (("ls", "--search", "\udced\udca0\udcbd"), "--search"),
        (("ls", "--label", "a:\udcff"), "--label"),
        (("try", "keeper", "Hi \udced\udca0\udcbd"), "TEXT"),
        (("edit", "keeper", "--ref-text", "\udcff"), "--ref-text"),
        (("rm", "a", "\udcff"), "NAME"),
        (("add", "\udcff", "clip.wav", "--consent", "c"), "NAME"),
        (("ls", "--url", "http://\udcff"), "--url"),
        (("ls", "--api-key", "secret\udcff"), "--api-key"),
        (("doctor", "--url", "http://\udcff"), "--url"),
    ),
)
async def test_stray_bytes_in_a_text_are_refused_by_its_name(arguments, named):
    done = await run(*(() if arguments[0] == "doctor" else ("voices",)), *arguments)
    assert (done.status, done.out) == (2, ""), done.err
    assert done.err == f"vllm-tts-cache: {named}: it holds bytes that are not UTF-8\n"


async def test_stray_bytes_in_a_path_are_a_file_like_any_other(url, tmp_path):
    clip = tmp_path / "a\udced.flac"
    clip.write_bytes(SPEECH.path.read_bytes())
    commands = (
        ("check", clip.name),
        ("add", "ann", clip.name, "--consent", "c"),
        ("try", "ann", "--out", "b\udced.wav", "--json", "--model", "m"),
        ("export", "ann", "--out", "c\udced", "--json"),
        ("import", "c\udced/ann.voice", "--on-conflict", "rename"),
    )
    assert await all_called(commands, {"SPEAKER_URL": url}, tmp_path) == [0] * 5
    assert (tmp_path / "b\udced.wav").read_bytes().startswith(b"RIFF")


FAR = "http://gpu-7.test:8091"


@pytest.mark.parametrize(
    ("environ", "address", "status", "words"),
    (
        ({"HTTP_PROXY": V6}, FAR, 3, f"through the proxy {V6} (HTTP_PROXY)"),
        ({"HTTP_PROXY": "http://u:pw@127.0.0.1:9"}, FAR, 3, "NO_PROXY=gpu-7.test"),
        ({"https_proxy": DOWN}, "https://gpu-7.test", 3, "(https_proxy)"),
        ({"ALL_PROXY": "what://pw"}, FAR, 2, "ALL_PROXY is no URL of a proxy"),
        ({"SSL_CERT_FILE": "/none"}, "https://127.0.0.1:9", 2, "SSL_CERT_FILE"),
        ({}, "localhost:8220", 2, "write http://localhost:8220"),
        ({}, "127.0.0.1:8220/v1/", 2, "write http://127.0.0.1:8220"),
        ({}, DOWN, 3, "Is the server running?"),
    ),
)
async def test_what_keeps_it_off_is_named(environ, address, status, words, monkeypatch):
    for name, text in {**environ, "SPEAKER_URL": address}.items():
        monkeypatch.setenv(name, text)
    done = await run("voices", "ls")
    assert (done.status, done.err.count("\n"), done.out) == (status, 1, ""), done.err
    assert words in done.err
    assert "pw" not in done.err


@pytest.mark.skipif(find_spec("socksio") is not None, reason="SOCKS works here")
def test_socks_says_what_to_install(tmp_path):
    given = {"ALL_PROXY": "socks5://127.0.0.1:9", "SPEAKER_URL": FAR}
    done = called(("ls",), given, tmp_path)
    said = done.stderr.decode()
    assert (done.returncode, said.count("\n")) == (2, 1)
    assert "pip install 'httpx[socks]'" in said and "NO_PROXY=gpu-7.test" in said
    doctor = called(("doctor", "--quick"), given, tmp_path)
    assert doctor.returncode == 1
    assert b"fail  server" in doctor.stdout and b"Traceback" not in doctor.stderr


async def test_a_proxy_that_is_up_is_asked(url, tmp_path):
    given = {"HTTP_PROXY": url, "SPEAKER_URL": FAR}
    done = await asyncio.to_thread(called, ("ls",), given, tmp_path)
    assert what_is_wrong(done, 0) is None
    assert NAME in done.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "status"), ((("rm", "ann"), 3), (("import", "-"), 1))
)
def test_a_closed_input_is_an_empty_one(arguments, status, tmp_path):
    program = [sys.executable, "-c", MAIN, "voices", *arguments]
    command = ["sh", "-c", '"$@" <&-', "sh", *program]
    done = ran(command, {"SPEAKER_URL": DOWN}, tmp_path)
    assert what_is_wrong(done, status) is None


def test_voices_are_kept_in_a_directory_of_any_name(tmp_path):
    command = [sys.executable, "-c", SEVERAL, "verify", ";", "gc", "--dry-run"]
    for name, environ in (("a\udced", {}), ("小", ASCII)):
        open_store(Settings(samples_dir=tmp_path / name)).close()
        given = {**environ, "SPEAKER_SAMPLES_DIR": str(tmp_path / name)}
        done = ran(command, given, tmp_path)
        assert what_is_wrong(done, 0) is None
        assert done.stderr.split()[-2:] == [b"0", b"0"]


def test_closed_and_full_outputs_are_said(tmp_path):
    command = [sys.executable, "-c", MAIN, "families", "--json"]
    for redirected, status in ((">&-", 1), ("2>&-", 0), ("> /dev/full", 1)):
        done = ran(["sh", "-c", f'"$@" {redirected}', "sh", *command], {}, tmp_path)
        assert done.returncode == status
        assert done.stderr.count(b"\n") == status, done.stderr.decode()


def as_nobody(*command, **environ):
    """Run something as a user without an entry, a home directory or a name."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        pytest.skip("needs root, and setpriv")
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["--reuid=12345", "--regid=12345", "--clear-groups", *reads]
    known = ("PATH", "PYTHONPATH")
    kept = {name: os.environ[name] for name in known if name in os.environ}
    return subprocess.run(
        [setpriv, *user, sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env={**kept, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_a_user_without_a_home_needs_a_directory_that_is_named(tmp_path):
    tmp_path.chmod(0o777)
    given = {"SPEAKER_SAMPLES_DIR": str(tmp_path / "speakers")}
    imported = as_nobody("-c", "import vllm_tts_cache.config, vllm_tts_cache.plugin")
    assert imported.returncode == 0, imported.stderr
    main = ("-c", MAIN)
    asked = ("voices", "ls", "--url", DOWN)
    for arguments, environ, status, words in (
        (asked, {}, 3, "does not answer"),
        (("verify",), {}, 2, "SPEAKER_SAMPLES_DIR is not set"),
        (("verify",), given, 2, str(tmp_path)),
        (("gc", "--directory", str(tmp_path)), {}, 2, str(tmp_path)),
        (("gc", "--directory", "~/voices"), {}, 2, "write the path without ~"),
        (("verify",), {"SPEAKER_SAMPLES_DIR": "~/v"}, 2, "SPEAKER_SAMPLES_DIR='~/v'"),
        (("voices", "ls", "--directory", "~/v"), given, 2, "without ~"),
        (("serve", "--work", "~/v"), given, 2, "without ~"),
    ):
        done = as_nobody(*main, *arguments, **environ)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), (
            arguments,
            done.stderr,
        )
        assert words in done.stderr, arguments
    doctor = as_nobody(*main, "doctor", "--quick", "--url", DOWN)
    assert (doctor.returncode, "Traceback" in doctor.stderr) == (1, False)
    assert "SPEAKER_SAMPLES_DIR is not set" in doctor.stdout
    doctor = as_nobody(*main, "doctor", "--quick", **given)
    assert "fail  settings" not in doctor.stdout, doctor.stdout
