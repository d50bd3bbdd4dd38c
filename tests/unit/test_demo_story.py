import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_tts_cache.entrypoints.cli.demo_story import (
    Act,
    Answer,
    Story,
    acts_of,
)
from vllm_tts_cache.speaker.family import trial_families
from vllm_tts_cache.testing.client import SpeechClient

IN_CONTEXT, X_VECTOR = "in_context", "x_vector"

AUDIO = b"\x01\x00" * 100
HEARD = Answer(status=200, cache="hit", ttfa_seconds=0.1, audio=AUDIO)


@dataclass
class Counts:
    """What the server below says that its worker has done."""

    url: str = ""
    encodes: dict[str, int] = field(default_factory=lambda: {"speaker": 1, "codec": 1})
    num_failed: int = 0


@pytest.fixture
def counts() -> Iterator[Counts]:
    told = Counts()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            worker = {"encodes": told.encodes, "failed_prompts": told.num_failed}
            body = json.dumps({"workers": [worker]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield told
        server.shutdown()
        thread.join()


def problems_of(
    counts: Counts, *answers: Answer, says: str = "", take: str | None = IN_CONTEXT
):
    story, client = Story(encoders=("speaker", "codec")), SpeechClient(counts.url)
    for number, answer in enumerate(answers):
        act = Act(
            label=f"act {number}",
            send=lambda _client, answer=answer: answer,
            num_encodes=1,
            says=says,
            take=take,
        )
        story.perform(act, client)
    client.close()
    return story.problems()


def test_equal_audio_and_the_right_counts_are_no_problem(counts):
    assert problems_of(counts, HEARD, HEARD) == []


@pytest.mark.parametrize(
    "answer, problem",
    [
        (Answer(status=500, body="it broke"), "status 500 instead of 200: it broke"),
        (
            Answer(status=200, cache="miss", audio=AUDIO),
            "X-Speaker-Cache is 'miss' instead of 'hit'",
        ),
        (Answer(status=200, cache="hit", audio=b""), "0 bytes are not 16-bit audio"),
        (
            Answer(status=200, cache="hit", audio=AUDIO + AUDIO),
            "the audio differs from the first in_context one",
        ),
    ],
)
def test_an_answer_that_does_not_hold_is_a_problem(counts, answer, problem):
    assert f"act 1: {problem}" in problems_of(counts, HEARD, answer)


def test_an_encode_too_many_is_a_problem(counts):
    counts.encodes = {"speaker": 1, "codec": 2}
    [problem] = problems_of(counts, HEARD)
    assert "'codec': 2" in problem


def test_a_request_that_failed_for_want_of_its_prompt_is_a_problem(counts):
    counts.num_failed = 1
    assert problems_of(counts, HEARD) == ["act 0: 1 requests without a prompt"]


def test_an_answer_that_says_something_else_is_a_problem(counts):
    answer = Answer(status=200, body='{"cache_status": "failed"}')
    [problem] = problems_of(counts, answer, says='"ready"', take=None)
    assert "does not say" in problem


def test_modes_that_cannot_be_told_apart_are_a_problem():
    story = Story(
        encoders=("speaker", "codec"), takes={IN_CONTEXT: AUDIO, X_VECTOR: AUDIO}
    )
    assert story.problems() == ["two modes are the same audio"]


@pytest.mark.parametrize(
    "family", tuple(dict.fromkeys(trial_families().values())), ids=lambda f: f.name
)
def test_every_mode_is_heard_and_after_the_restart_nothing_may_be_encoded(family):
    first, second = acts_of(family)
    assert {act.num_encodes for act in first} == {0, 1}
    assert {act.num_encodes for act in second} == {0}
    takes = [{a.take for a in acts if a.take} for acts in (first, second)]
    assert takes[0] == takes[1] == {mode.name for mode in family.modes}
