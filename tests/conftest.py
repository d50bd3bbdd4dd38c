"""What tests of several levels share; heavy imports wait until they are needed."""

import gc
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.catalogues import object_server, postgres  # noqa: F401
from tests.served import (  # noqa: F401  fixtures and a hook of all that follow
    case,
    checkpoint,
    client,
    journey,
    make_clip,
    pytest_generate_tests,
    running,
    shared_server,
)
from vllm_tts_cache.speaker.family import Family, default_family, families
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

ORDER = {family.name: place for place, family in enumerate(families())}
MEMORY = Path("/dev/shm")
MEMORY_MIN_BYTES = 4 * 1024**3  # several times what a whole run leaves behind


def pytest_configure() -> None:
    """Let the servers of each process start beside those of the other ones.

    And keep temporary files in memory where it has the room and runs programs: tests
    end processes, never the machine, so that none needs what an fsync waits for.
    """
    # Hypothesis times what it makes, and a busy machine is slow.
    too_slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("busy", **too_slow)
    settings.load_profile("busy")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.environ["TTS_CACHE_CPU_DEVICE"] = worker.removeprefix("gw")
    if MEMORY.is_dir():
        there = os.statvfs(MEMORY)
        has_room = there.f_bavail * there.f_frsize > MEMORY_MIN_BYTES
        if has_room and not there.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(trylast=True)  # after pytest's own order, which splits a family
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the end-to-end tests first, a family's together and as they are written."""
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Leave out of each later collection what the host has imported: half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the host's modules end as they do: some tell of what they find alive."""
    gc.unfreeze()


def _place(item: pytest.Item) -> tuple[int, str, int]:
    """Sort only end-to-end tests, which are the first; the others stay as they are."""
    if level_of(item.nodeid) != "e2e":
        return (len(ORDER) + 1, "", 0)
    file, line, _ = item.location
    return (ORDER.get(group_of(item.nodeid), len(ORDER)), file, line or 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no server run beside tests that do not need it."""
    running.stop_others(group_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process of ``-n 3`` whole files, or all that a family's servers do."""
    # Not by xdist's own groups: those of 3.8 do nothing under pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByServers(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time that each level took, summed over processes."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[level_of(report.nodeid)] += report.duration
    terminalreporter.section("time of each level", sep="-")
    terminalreporter.line(f"on {processor()}")
    for level, spent in sorted(seconds.items()):
        terminalreporter.line(f"{level:10} {spent:8.1f} s")


def processor() -> str:
    """Which CPU the claims about equal bits were tested on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "an unknown processor"
    known = {k.strip(): v.strip() for k, _, v in (ln.partition(":") for ln in lines)}
    flags = known.get("flags", "").split()
    has = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f in flags]
    return f"{known.get('model name', 'an unknown processor')} ({', '.join(has)})"


def group_of(nodeid: str) -> str:
    """A file, or the family of an end-to-end test."""
    file, _, name = nodeid.partition("::")
    if level_of(nodeid) == "e2e":
        parameters = name.partition("[")[2]
        return next((family for family in ORDER if family in parameters), file)
    return file


def level_of(nodeid: str) -> str:
    """unit, contract, families, fault or e2e."""
    if "e2e" in nodeid.partition("::")[0]:
        return "e2e"
    return nodeid.removeprefix("tests/").split("/")[0]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a family's tiny checkpoint once for each set of options; do not change it.

    Called with a family, and with options of its checkpoint.
    """
    written: dict[str, Path] = {}

    def of(family: Family, **options: Any) -> Path:
        wanted = TinyCheckpoint(family, **options)
        key = repr(wanted.marker)
        if key not in written:
            out = tmp_path_factory.mktemp(family.name) / "tiny"
            written[key] = wanted.write(out)
        return written[key]

    return of


@pytest.fixture(scope="session")
def default_checkpoint(tiny: Callable[..., Path]) -> Path:
    """The default family's, for tests that are about no family."""
    return tiny(default_family())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """A store in the test's folder, sound when the test ends."""
    from tests.store_samples import opened

    store = opened(tmp_path)
    yield store
    assert store.verify() == []
    store.close()


@pytest.fixture
def environment(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The variables that the test's marks name."""
    for mark in request.node.iter_markers("environment"):
        for name, value in mark.kwargs.items():
            monkeypatch.setenv(name, value)


@pytest.fixture
async def server(
    environment: None,
    default_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Any]:
    """The host's real server in this process, but for its engine."""
    from tests.speech_server import Server, running

    made = Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    async with running(made) as server:
        yield server


@pytest.fixture(autouse=True)
def every_level_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """Hear every level: a package that the host imports silences whoever listens."""
    caplog.handler.setLevel(logging.NOTSET)


@pytest.fixture
def plugin_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The plugin's log, also where vLLM was imported and keeps its loggers' lines."""
    logger = logging.getLogger("vllm.vllm_tts_cache")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        default=os.environ.get("TTS_CACHE_TEST_KILLS", "20"),
        help="how often the store is killed in tests/fault/store/test_kills.py",
    )
