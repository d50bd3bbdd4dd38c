import json
import os
import subprocess
import sys
import threading
import time

import pytest
from typer.main import get_command

from tests.cli_runs import MAIN, printed_by
from tests.waiting import wait_until
from tests.web import Web
from vllm_tts_cache.entrypoints.cli import app, main
from vllm_tts_cache.speaker.family import trial_families

# They become a server, or write what nobody would read by a program.
WITHOUT_JSON = ("serve", "make-checkpoint")
HELPS = ("--help", "make-checkpoint --help", "voices add --help", "doctor -h")


def test_help_answers_without_torch_or_vllm():
    script = (
        "import sys, vllm_tts_cache.entrypoints.cli.voices.adding\n"
        "from vllm_tts_cache.entrypoints.cli import main\n"
        f"assert not any(main(each.split()) for each in {HELPS})\n"
        "print({'torch', 'vllm', 'vllm_omni', 'transformers'} & set(sys.modules))\n"
    )
    printed = printed_by(script)
    assert printed.count("Usage: vllm-tts-cache") == len(HELPS)
    assert printed.endswith("set()\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    (
        ("", ["voices", "doctor", "gc"]),
        ("voices e", ["edit", "export"]),
        ("stage-config fish-speech-", ["fish-speech-cpu"]),
        ("voices ls --sort n", ["name", "newest"]),
    ),
)
def test_a_shell_completes_commands_and_choices(typed, offered):
    words = ["vllm-tts-cache", *typed.split(" ")]
    asked = {
        "_VLLM_TTS_CACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    assert printed_by(MAIN, **asked).split()[: len(offered)] == offered


def commands_of(group, *path):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield (*path, name), command
        if hasattr(command, "list_commands"):
            yield from commands_of(command, *path, name)


@pytest.mark.parametrize(
    "path", [path for path, _ in commands_of(get_command(app))], ids=" ".join
)
def test_every_command_has_help_with_examples_or_commands(path, capsys):
    assert main([*path, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text or "Commands:" in text
    assert "--json" in text or "Commands:" in text or path[-1] in WITHOUT_JSON


def test_a_word_that_is_no_command_is_status_2(capsys):
    assert main(["voices", "lst"]) == 2
    assert "Did you mean 'ls'?" in capsys.readouterr().err


@pytest.mark.parametrize(("out", "status"), [("", 2), ("somebody's/out", 1)])
def test_a_wrong_setting_and_a_failing_disk_are_one_line(tmp_path, capsys, out, status):
    (tmp_path / "somebody's").write_text("file")
    assert main(["make-checkpoint", "--out", str(tmp_path / out)]) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"vllm-tts-cache: {'--out ' if status == 2 else ''}")
    assert output.err.count("\n") == 1


def test_the_demo_leaves_somebody_elses_directory_alone(tmp_path):
    """It empties the directories that it works in."""
    precious = tmp_path / "speakers" / "alice"
    precious.parent.mkdir()
    precious.write_text("voice")
    assert main(["demo", "--work", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.rglob("*")] == ["speakers", "alice"]
    assert precious.read_text() == "voice"


@pytest.mark.parametrize(
    "family", tuple(dict.fromkeys(trial_families().values())), ids=lambda f: f.name
)
def test_make_checkpoint_writes_the_family_that_was_asked_for(tmp_path, family):
    options = ["--family", family.short_name, "--seed", "5"]
    assert main(["make-checkpoint", "--out", str(tmp_path / "out"), *options]) == 0
    assert family.recognises(tmp_path / "out")
    marker = json.loads((tmp_path / "out" / ".random-weights.json").read_text())
    assert marker["family"] == family.name
    assert (marker["encoders"], marker["seed"]) == ("tiny", 5)


ANNOUNCE = """
import subprocess, sys
from vllm_tts_cache.entrypoints.cli.trial import announce
server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
announce(server.pid, sys.argv[1], "what to do next")
input()
server.kill()
server.wait()
"""


def test_serve_says_what_to_do_next_when_the_server_answers():
    with Web() as web:
        serving = threading.Thread(target=web.serve_forever, args=(0.01,))
        process = announcing(f"{web.url}/health", all_proxy="socks5://127.0.0.1:9")
        assert process.stdin and process.stderr
        try:
            time.sleep(1.0)
            web.answers["GET", "/health"] = 503, {}, b""
            serving.start()  # nobody has answered before
            wait_until(lambda: web.sent)
            web.answers["GET", "/health"] = 200, {}, b""
            assert process.stderr.read(len("what to do next")) == b"what to do next"
            process.stdin.write(b"\n")
        finally:
            web.shutdown()
            serving.join()
            process.communicate()


def test_serve_says_nothing_of_a_server_that_ends():
    process = announcing("http://127.0.0.1:9/health")
    _, said = process.communicate(b"\n", 60)  # when all that could write have ended
    assert said == b""


def announcing(url, **environ):
    return subprocess.Popen(
        [sys.executable, "-c", ANNOUNCE, url],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environ},
    )
