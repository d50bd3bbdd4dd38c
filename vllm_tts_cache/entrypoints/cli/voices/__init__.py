"""``vllm-tts-cache voices``: the voices of a server, or of its directory."""

from vllm_tts_cache.entrypoints.cli.common import STATUSES, examples, new_app
from vllm_tts_cache.entrypoints.cli.voices import adding, bundles, registered

# In the order in which they are listed, with their examples.
_COMMANDS = {
    "ls": (
        registered.ls,
        "vllm-tts-cache voices ls --label language:de --sort newest --limit 20",
        "vllm-tts-cache voices ls --json | jq -r '.voices[].name'",
        "vllm-tts-cache voices ls --directory ~/.cache/vllm-omni/speakers",
    ),
    "show": (
        registered.show,
        "vllm-tts-cache voices show keeper",
        "vllm-tts-cache voices show keeper --json | jq -r .cache_status",
    ),
    "add": (
        adding.add,
        "vllm-tts-cache voices add keeper clip.flac --consent 'signed 2026' \\",
        "  --ref-text 'What is said in the clip.' --language en --label team:news",
        "# of several clips, on a model that takes them",
        "vllm-tts-cache voices add keeper a.wav b.wav --consent 'signed 2026' \\",
        "  --ref-text 'What is said in a.' --ref-text 'What is said in b.'",
        "# many: shows a bar; run it again to go on after Ctrl-C",
        "vllm-tts-cache voices add --manifest voices.csv --jobs 8 --wait",
        "# why some failed",
        "vllm-tts-cache voices add --manifest voices.csv --json \\",
        "  | jq '.voices[] | select(.outcome == \"failed\")'",
    ),
    "check": (
        adding.check,
        "vllm-tts-cache voices check *.wav",
        "vllm-tts-cache voices check *.wav --offline",
        "vllm-tts-cache voices check clip.wav --ref-text 'What is said in it.'",
    ),
    "warm": (
        registered.warm,
        "vllm-tts-cache voices warm keeper",
        "vllm-tts-cache voices warm --all --jobs 8",
        "vllm-tts-cache voices warm --label team:news --json",
    ),
    "edit": (
        registered.edit,
        "vllm-tts-cache voices edit keeper --name Keeper --label team:news",
        "vllm-tts-cache voices edit keeper --clear ref-text",
        "vllm-tts-cache voices edit keeper --expires-at 2031-01-01T00:00:00Z",
    ),
    "rm": (
        registered.rm,
        "vllm-tts-cache voices rm keeper",
        "vllm-tts-cache voices rm --yes ann bob",
        "vllm-tts-cache voices rm ann --directory ~/.cache/vllm-omni/speakers",
    ),
    "export": (
        bundles.export,
        "vllm-tts-cache voices export keeper",
        "vllm-tts-cache voices export --all --out backup/",
        "vllm-tts-cache voices export --all --out b/ --directory /srv/speakers",
    ),
    "import": (
        bundles.import_,
        "vllm-tts-cache voices import keeper.voice --name keeper-2",
        "vllm-tts-cache voices import backup/*.voice --on-conflict replace",
        "# into a directory whose server is stopped",
        "vllm-tts-cache voices import backup/*.voice --directory /srv/speakers",
        "# a whole library; run it again to go on after Ctrl-C",
        "vllm-tts-cache voices import backup/ --jobs 8",
    ),
    "usage": (
        registered.usage,
        "vllm-tts-cache voices usage --since 2026-11-01",
        "vllm-tts-cache voices usage --json | jq .totals",
    ),
    "try": (
        registered.try_,
        "vllm-tts-cache voices try keeper 'Hello there.' --out hello.wav",
        "vllm-tts-cache voices try keeper --out - | aplay",
        "vllm-tts-cache voices try keeper --json | jq .cache",
    ),
}

voices_app = new_app(epilog=STATUSES)


@voices_app.callback()
def _voices() -> None:
    """List, add, check, change, save and try voices.

    They are those of the server at --url; ls, show, export, import and rm also take the
    directory of a stopped one (--directory).
    """


for name, (command, *lines) in _COMMANDS.items():
    voices_app.command(name, epilog=examples(*lines))(command)
