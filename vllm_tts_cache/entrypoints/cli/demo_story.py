"""The demo's story: what is asked of a server, and what must hold of its answers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from vllm_tts_cache.testing.client import SpeechClient, data_url
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.families import ServedFamily

VOICE = "keeper"
SECOND_VOICE = "keeper again"
TEXT = "The tide is out, and the boats lie on the sand."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request was answered.

    Attributes:
        body: A JSON answer, or the error of a speech request, as text.
        audio: Mono 16-bit samples; empty if the request asked for none.
    """

    status: int
    body: str = ""
    cache: str | None = None
    ttfa_seconds: float | None = None
    audio: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One request, and what must hold of its answer.

    Attributes:
        num_encodes: By each encoder, since this server's start.
        says: What the answer must contain.
        take: Requests with the same take must be the same audio, bit for bit.
    """

    label: str
    send: Callable[[SpeechClient], Answer]
    num_encodes: int
    says: str = ""
    take: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table."""

    act: Act
    answer: Answer
    encodes: dict[str, int]
    problems: tuple[str, ...]


@dataclass(slots=True)
class Story:
    """What has happened so far, and the audio that later answers must equal.

    Attributes:
        encoders: Of the family that is served.
        starts: Numbers of the outcomes that are the first of a server.
    """

    encoders: tuple[str, ...]
    starts: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    takes: dict[str, bytes] = field(default_factory=dict)

    def begin_server(self) -> None:
        """Note that the next act meets a new server."""
        self.starts.append(len(self.outcomes))

    def perform(self, act: Act, client: SpeechClient) -> Outcome:
        """Send the request and judge its answer.

        Raises: httpx.HTTPError if the server cannot be reached.
        """
        answer = act.send(client)
        workers = client.stats()["workers"]
        problems = (
            *_problems(act, answer),
            *self._audio_problems(act, answer),
            *_encode_problems(act, self.encoders, workers),
        )
        outcome = Outcome(
            act=act, answer=answer, encodes=client.encodes(), problems=problems
        )
        self.outcomes.append(outcome)
        return outcome

    def problems(self) -> list[str]:
        """Everything that did not hold, one line each."""
        found = [f"{o.act.label}: {p}" for o in self.outcomes for p in o.problems]
        if len(set(self.takes.values())) < len(self.takes):
            found.append("an in-context and an x-vector clone are the same audio")
        return found

    def _audio_problems(self, act: Act, answer: Answer) -> list[str]:
        if act.take is None or answer.status != 200:
            return []
        if not answer.audio or len(answer.audio) % 2:
            return [f"{len(answer.audio)} bytes are not 16-bit audio"]
        if self.takes.setdefault(act.take, answer.audio) != answer.audio:
            return [f"the audio differs from the first {act.take} one"]
        return []


def sha256_prefix(audio: bytes) -> str:
    """Enough of the hash to compare by eye."""
    return hashlib.sha256(audio).hexdigest()[:8]


def _problems(act: Act, answer: Answer) -> list[str]:
    problems = []
    if answer.status != 200:
        problems.append(f"status {answer.status} instead of 200: {answer.body[:300]}")
    elif act.says not in answer.body:
        problems.append(f"the answer does not say {act.says!r}: {answer.body[:300]}")
    if act.take is not None and answer.cache != "hit":
        problems.append(f"X-Speaker-Cache is {answer.cache!r} instead of 'hit'")
    return problems


def _encode_problems(
    act: Act, encoders: tuple[str, ...], workers: list[dict[str, object]]
) -> list[str]:
    problems = []
    wanted = dict.fromkeys(encoders, act.num_encodes)
    for worker in workers:
        if worker["encodes"] != wanted:
            problems.append(f"encodes are {worker['encodes']} instead of {wanted}")
        if worker["failed_prompts"]:
            problems.append(f"{worker['failed_prompts']} requests without a prompt")
    return problems


def _register(name: str) -> Callable[[SpeechClient], Answer]:
    def send(client: SpeechClient) -> Answer:
        fields = {"ref_text": SPEECH.transcript, "precompute": "false"}
        return _json(client.register(name, SPEECH.path, **fields))

    return send


def _speak(**fields: object) -> Callable[[SpeechClient], Answer]:
    def send(client: SpeechClient) -> Answer:
        speech = client.speak(TEXT, **fields)
        is_audio = speech.status == 200
        return Answer(
            status=speech.status,
            body="" if is_audio else speech.audio.decode(errors="replace"),
            cache=speech.cache,
            ttfa_seconds=speech.ttfa_seconds,
            audio=speech.audio if is_audio else b"",
        )

    return send


def _json(response: httpx.Response) -> Answer:
    return Answer(status=response.status_code, body=response.text)


def _precompute(client: SpeechClient) -> Answer:
    return _json(client.precompute(VOICE))


_by_voice = _speak(voice=VOICE)
_x_vector = _speak(voice=VOICE, x_vector_only_mode=True)
_inline = _speak(ref_audio=data_url(SPEECH.path), ref_text=SPEECH.transcript)

IN_CONTEXT, X_VECTOR = "in-context", "x-vector"

FIRST_SERVER = (
    Act(label="register the voice", send=_register(VOICE), num_encodes=0),
    Act(label="precompute it", send=_precompute, num_encodes=1, says='"ready"'),
    Act(
        label="precompute it again",
        send=_precompute,
        num_encodes=1,
        says="already exists",
    ),
    Act(label="speak, first time", send=_by_voice, num_encodes=1, take=IN_CONTEXT),
    Act(label="speak, warm", send=_by_voice, num_encodes=1, take=IN_CONTEXT),
    Act(
        label="second name, same clip",
        send=_register(SECOND_VOICE),
        num_encodes=1,
    ),
    Act(
        label="speak, second name",
        send=_speak(voice=SECOND_VOICE),
        num_encodes=1,
        take=IN_CONTEXT,
    ),
    Act(label="speak, clip inline", send=_inline, num_encodes=1, take=IN_CONTEXT),
    Act(label="speak, x-vector", send=_x_vector, num_encodes=1, take=X_VECTOR),
)

SECOND_SERVER = (
    Act(label="speak after restart", send=_by_voice, num_encodes=0, take=IN_CONTEXT),
    Act(label="inline after restart", send=_inline, num_encodes=0, take=IN_CONTEXT),
    Act(label="x-vector after restart", send=_x_vector, num_encodes=0, take=X_VECTOR),
)


def acts_of(family: ServedFamily) -> tuple[tuple[Act, ...], tuple[Act, ...]]:
    """Return what the first and the second server are asked.

    A family that clones in context only is not asked for anything else.
    """
    if family.family.clones_from_embeddings:
        return FIRST_SERVER, SECOND_SERVER
    first, second = (
        tuple(act for act in acts if act.take != X_VECTOR)
        for acts in (FIRST_SERVER, SECOND_SERVER)
    )
    return first, second
