"""``vllm-tts-cache voices``: the voices of a server, or of a stopped one."""

from vllm_tts_cache.entrypoints.cli.style import STATUSES, new_app
from vllm_tts_cache.entrypoints.cli.voices import adding, bundles, changing, listing

voices_app = new_app(epilog=STATUSES)


@voices_app.callback()
def _voices() -> None:
    """List, add, check, change, save and try voices.

    They are those of the server at --url; ls, show, export, import and rm also take the
    directory of a stopped one (--directory).
    """


for module in (listing, adding, changing, bundles):
    for name, (command, epilog) in module.COMMANDS.items():
        voices_app.command(name, epilog=epilog)(command)
