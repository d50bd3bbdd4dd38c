import json
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from benchmarks import server_plugins
from benchmarks.__main__ import _parser, _plan
from benchmarks.bench import SAMPLE_RATE_HZ, Bench, clip
from benchmarks.measure import OURS, STOCK, RatioAtMost, Row, Summary
from benchmarks.models import models
from benchmarks.run import SCENARIOS, Plan, Scenario, of_model, run
from benchmarks.scenarios import bulk_registration, inline_flood
from benchmarks.sides import Side, open_sides
from benchmarks.streams import Bystanders
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.testing.server import SpeechClient

FIRST = models()[0]
SMALL = next(m for m in models() if "bulk_registration" in m.scenarios)
SHARING = next(m for m in models() if m.shares_kv)
WHOLE = next(m for m in models() if "cold_neighbour" in m.scenarios)

ROOT = Path(__file__).resolve().parents[2]


def a_bench(tmp_path, **fields):
    given = {"num_rounds": 1, "is_quick": True, "work": tmp_path}
    return Bench(**{**given, **fields}, step=lambda _: None)


def plan_of(*arguments):
    return _plan(_parser().parse_args(arguments))


def beside(plan):
    return {model.name: [s.name for s in scenarios] for model, scenarios in plan.served}


def test_texts_and_numbers_are_never_given_twice(tmp_path):
    bench = a_bench(tmp_path)
    texts = [bench.text(1) for _ in range(250)]
    texts += [bench.short_text() for _ in range(250)]
    assert len(set(texts)) == 500
    lengths = [len(text) for text in texts[:250]]
    assert max(lengths) - min(lengths) <= 8
    assert bench.text(3).count(".") == 3


def test_clips_are_what_the_server_accepts_and_unlike_each_other():
    first, again, other = clip(1.5, 1), clip(1.5, 1), clip(1.5, 2)
    audio = decode(first).audio
    assert (audio.sample_rate_hz, audio.num_samples) == (SAMPLE_RATE_HZ, 66_150)
    assert audio.audio_sha256 == decode(again).audio.audio_sha256
    assert audio.audio_sha256 != decode(other).audio.audio_sha256
    assert decode(first).warnings == ()


def test_the_servers_find_their_plugins_and_no_other_process_does(tmp_path):
    plugins = [
        plugin
        for model in models()
        for plugin in (*model.server_plugins, *model.stock.server_plugins)
    ]
    plugins = list(dict.fromkeys(plugins))
    assert len(plugins) == 6
    server_plugins.announce(tmp_path, plugins)
    program = (
        "import sys; from importlib.metadata import entry_points;"
        "found = entry_points(group='vllm_omni.general_plugins');"
        "ours = [e for e in found if e.value.startswith('benchmarks.')];"
        "print([e.value for e in ours]);"
        # In a process that is no worker there is nothing to do, nor to import.
        "[e.load()() for e in ours];"
        "print('host imported:', any(m.startswith('vllm_omni') for m in sys.modules))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(plugins) in seen.stdout
    assert "host imported: False" in seen.stdout


def test_a_process_that_another_has_started_counts_as_a_stage_of_a_server():
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        checks = server_plugins.is_server_process, server_plugins.is_server_api
        assert [pool.submit(check).result() for check in checks] == [True, False]


def test_a_module_is_announced_by_its_register(tmp_path):
    server_plugins.announce(tmp_path, ["some.module", "other:function"])
    (text,) = [f.read_text() for f in tmp_path.glob("*.dist-info/entry_points.txt")]
    assert "= some.module:register\n" in text
    assert "= other:function\n" in text


def test_scenarios_have_names_of_their_own():
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names) == 15


def test_a_scenario_runs_only_where_it_says_something():
    served = beside(plan_of())
    first, sharing = served[FIRST.name], served[SHARING.name]
    only_first = {"concurrent_cold", "cold_bystander", "inline_flood"}
    assert set(first) - set(sharing) == only_first
    assert {"kv_prefix"} == set(sharing) - set(first)
    assert served[SMALL.name] == ["bulk_registration", "bulk_command"]
    # Answers of the one come in chunks, of the other whole.
    assert "cold_neighbour" not in first
    assert "cold_bystander" not in served[WHOLE.name]
    # It leaves ours with another setting.
    assert first[-1] == sharing[-1] == "first_request"


def test_every_model_adds_its_servers_and_what_runs_beside_them():
    one = plan_of("--model", FIRST.name, "--rounds", "2").seconds
    two = plan_of("--model", FIRST.name, "--model", SHARING.name, "--rounds", "2")
    added = {m.name: s for m, s in two.served}[SHARING.name]
    more = 120 + sum(s.full[0] + 2 * s.full[1] for s in added)
    assert two.seconds == one + more


def test_a_quick_run_is_meant_to_take_less_than_five_minutes():
    plan = plan_of("--quick")
    assert plan.seconds <= 300
    assert [model.name for model in plan.models] == [FIRST.name]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("bulk_registration", SMALL),
        ("kv_prefix", SHARING),
        ("cold_neighbour", WHOLE),
    ],
)
def test_a_quick_run_has_what_it_would_leave_out_where_that_is_named(name, model):
    assert beside(plan_of("--quick", "--only", name)) == {model.name: [name]}


def test_a_size_is_given_by_the_command_line_or_by_how_much_is_asked_for(tmp_path):
    plan = plan_of("--size", "inline_flood=7")
    assert plan.sizes == {"inline_flood": 7}
    bench = a_bench(tmp_path, sizes=plan.sizes)
    assert bench.size("inline_flood", full=200, quick=40) == 7
    assert bench.size("many_voices", full=100_000, quick=5_000) == 5_000


def test_a_size_of_no_scenario_is_refused(capsys):
    with pytest.raises(SystemExit):
        plan_of("--size", "nothing=7")
    assert "--size" in capsys.readouterr().err


def test_a_model_that_no_scenario_serves_starts_no_server():
    plan = plan_of("--only", "cold_bystander", "--model", SHARING.name)
    assert (plan.served, plan.seconds) == ([], 0)


def test_a_scenario_that_fails_costs_only_its_own_rows(tmp_path, capsys):
    def bad(_bench):
        raise RuntimeError("no audio")

    def good(_bench):
        return [Row("w", "ms", Summary.of([1.0]))]

    for scenario in (bad, good):
        scenario.__module__ = f"scenarios.{scenario.__name__}"
    seconds = {"full": (1, 0), "quick": (1, 0)}
    outcome = run(
        Plan(
            scenarios=[Scenario(s, is_served=False, **seconds) for s in (bad, good)],
            models=(),
            num_rounds=1,
            is_quick=False,
            work=tmp_path,
        )
    )
    assert [(row.scenario, row.what) for row in outcome.rows] == [("good", "w")]
    assert outcome.failures == ["bad: no audio"]
    assert "Traceback" in capsys.readouterr().err


def test_what_stock_was_changed_by_is_said_beside_its_figures_only():
    note, one = SHARING.stock.note, Summary.of([1])
    rows = [
        Row("w", "ms", one, one, note="n"),
        Row("w", "ms", one),
        Row("w", "ms", one, one, versus="ours, first"),
    ]
    shown = [of_model(row, SHARING) for row in rows]
    assert [row.note for row in shown] == [f"n; {note}", "", ""]
    assert {row.model for row in shown} == {SHARING.name}
    assert of_model(rows[0], FIRST).note == "n"


def test_stock_and_ours_differ_in_what_the_table_says_they_do(tmp_path):
    SHARING.checkpoint(tmp_path)
    folders = [
        tmp_path / f"{SHARING.name}-{s.name}" for s in open_sides(SHARING, tmp_path)
    ]
    stock, ours = (yaml.safe_load((f / "deploy.yaml").read_text()) for f in folders)
    assert stock.pop("stages") == [{"stage_id": 0, "enable_prefix_caching": False}]
    assert ours.pop("stages") == []
    assert stock == ours
    announced = [
        next(f.glob("plugin/*.dist-info/entry_points.txt")).read_text() for f in folders
    ]
    assert ["small_codec" in text for text in announced] == [True, False]


class OneSide:
    """What a scenario needs of a side, over a server of this process."""

    encodes = Side.encodes

    def __init__(self, url="http://127.0.0.1:9", *, is_stock=False):
        self.name = STOCK if is_stock else OURS
        self.is_stock, self.is_ours = is_stock, not is_stock
        self.client = SpeechClient(url)


def test_gaps_are_told_apart_by_side_and_by_what_happened(tmp_path):
    streams = Bystanders(a_bench(tmp_path), "while it rains")
    for side, slower in ((OURS, 2), (STOCK, 8)):
        for _ in range(3):
            streams.keep(side, "quiet", [100.0] * 99)
            streams.keep(side, "while it rains", [100.0] * 95 + [100.0 * slower] * 5)
    rows = streams.rows(target=RatioAtMost(1.2), picture="gaps")
    shown = {row.what: (row.ours.median, row.reference.median) for row in rows}
    assert shown == {
        "gap between chunks, quiet, every one": (100, 100),
        "gap between chunks, quiet, p99": (100, 100),
        "gap between chunks, while it rains, every one": (100, 100),
        "gap between chunks, while it rains, p99": (200, 800),
        "p99 gap, while it rains, against quiet": (200, 100),
    }
    assert [len(row.ours.samples) for row in rows] == [297, 3, 300, 3, 3]
    assert rows[-1].is_met is False
    assert {row.point.line for row in rows if row.point} == {"quiet", "while it rains"}


def test_streams_that_say_nothing_are_an_error_and_not_a_short_gap(tmp_path):
    with pytest.raises(RuntimeError, match="no stream had two chunks"):
        Bystanders(a_bench(tmp_path), "while").keep(OURS, "quiet", [])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a flood comes at once


@pytest.fixture
def serve():
    """Start a server of this process that answers with a function of the path."""
    started = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer()

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer()

            def _answer(self):
                status, body = answer(self.path)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has left
                    pass

            def log_message(self, *_):
                pass

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever).start()
        started.append(server)
        return OneSide(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def stats(**fields):
    return lambda _path: (200, json.dumps({"workers": [fields]}).encode())


def test_rpcs_are_counted_without_our_own_and_only_where_they_are_told(serve):
    told = serve(stats(rpc_calls={"tts_cache_want": 5, "tts_cache_stats": 90}))
    assert bulk_registration._num_calls(told) == 5
    assert bulk_registration._num_calls(serve(stats(encodes={}))) is None
    assert bulk_registration._num_calls(OneSide(is_stock=True)) is None


def test_voices_are_ready_when_every_encoder_has_encoded_all_of_them(
    serve, monkeypatch
):
    seen = iter([(3, 2), (7, 4), (7, 6), (9, 9)])

    def answer(_path):
        speaker, codec = next(seen)
        worker = {"encodes": {"speaker": speaker, "codec": codec}}
        return 200, json.dumps({"workers": [worker]}).encode()

    monkeypatch.setattr(bulk_registration, "ASK_SECONDS", 0.01)
    side = serve(answer)
    before = side.encodes()
    bulk_registration._wait_until_encoded(side, before, 4)
    assert next(seen) == (9, 9)


async def test_a_flood_leaves_in_time_and_counts_who_was_refused(serve, monkeypatch):
    arrived = []

    def answer(path):
        arrived.append(path)
        if len(arrived) <= 3:
            return 503, b""
        time.sleep(2)
        return 200, b"late"

    monkeypatch.setattr(inline_flood, "LEAVE_AFTER_SECONDS", 0.5)
    side = serve(answer)
    began = time.monotonic()
    assert await inline_flood._flood(side, [{"input": "x"}] * 8) == 3
    assert time.monotonic() - began < 1.5
    assert arrived == ["/v1/audio/speech"] * 8
