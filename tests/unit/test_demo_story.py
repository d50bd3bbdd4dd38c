import pytest

from tests.web import serving
from vllm_tts_cache.entrypoints.cli.demo import Act, Story, acts_of
from vllm_tts_cache.speaker.family import trial_families
from vllm_tts_cache.testing.server import Speech, SpeechClient

IN_CONTEXT, X_VECTOR = "in_context", "x_vector"

AUDIO = b"\x01\x00" * 100


def answer(status=200, cache: str | None = "hit", audio=AUDIO):
    return Speech(status=status, cache=cache, ttfa_seconds=0.1, audio=audio)


HEARD = answer()


class Counts:
    """What the server says that its worker has done."""

    def __init__(self, web):
        self._web, self.url = web, web.url
        self.worked(codec=1)

    def worked(self, *, codec, num_failed=0):
        encodes = {"speaker": 1, "codec": codec}
        worker = {"encodes": encodes, "failed_prompts": num_failed}
        told = 200, {}, {"workers": [worker]}
        self._web.answers["GET", "/v1/audio/speaker_cache"] = told


@pytest.fixture
def counts():
    with serving() as web:
        yield Counts(web)


def problems_of(
    counts: Counts, *answers: Speech, says: str = "", take: str | None = IN_CONTEXT
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
    "wrong, problem",
    [
        (answer(500, None, b"it broke"), "status 500 instead of 200: it broke"),
        (
            answer(cache="miss"),
            "X-Speaker-Cache is 'miss' instead of 'hit'",
        ),
        (answer(audio=b""), "0 bytes are not 16-bit audio"),
        (
            answer(audio=AUDIO + AUDIO),
            "the audio differs from the first in_context one",
        ),
    ],
)
def test_an_answer_that_does_not_hold_is_a_problem(counts, wrong, problem):
    assert f"act 1: {problem}" in problems_of(counts, HEARD, wrong)


def test_what_else_does_not_hold_is_a_problem(counts):
    failed = answer(cache=None, audio=b'{"cache_status": "failed"}')
    [problem] = problems_of(counts, failed, says='"ready"', take=None)
    assert "does not say" in problem
    takes = {IN_CONTEXT: AUDIO, X_VECTOR: AUDIO}
    story = Story(encoders=("speaker", "codec"), takes=takes)
    assert story.problems() == ["two modes are the same audio"]
    counts.worked(codec=2, num_failed=1)
    many, failed = problems_of(counts, HEARD)
    assert "'codec': 2" in many and failed == "act 0: 1 requests without a prompt"


@pytest.mark.parametrize(
    "family", tuple(dict.fromkeys(trial_families().values())), ids=lambda f: f.name
)
def test_every_mode_is_heard_and_after_the_restart_nothing_may_be_encoded(family):
    first, second = acts_of(family)
    assert {act.num_encodes for act in first} == {0, 1}
    assert {act.num_encodes for act in second} == {0}
    takes = [{a.take for a in acts if a.take} for acts in (first, second)]
    assert takes[0] == takes[1] == {mode.name for mode in family.modes}
