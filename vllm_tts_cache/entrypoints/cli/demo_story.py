"""The demo's story: what is asked of a server, and what must hold of its answers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.modes import CLONE_MODE, CloneFacts, Mode
from vllm_tts_cache.testing.client import SpeechClient, data_url
from vllm_tts_cache.testing.clips import SPEECH

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
            found.append("two modes are the same audio")
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


def acts_of(family: Family) -> tuple[tuple[Act, ...], tuple[Act, ...]]:
    """Return what the first and the second server are asked.

    The voice speaks in the mode that a voice with a transcript has, and then in every
    other one of the family.
    """
    usual = family.mode(CloneFacts(stored_transcript=True))
    others = [mode for mode in family.modes if mode is not usual]
    speak = _speak(voice=VOICE)
    inline = _speak(
        ref_audio=data_url(SPEECH.path),
        ref_text=SPEECH.transcript,
        extra_params={CLONE_MODE: usual.name},
    )

    def act(label: str, send: Callable[[SpeechClient], Answer], **more: Any) -> Act:
        return Act(label=label, send=send, num_encodes=1, **more)

    first = (
        Act(label="register the voice", send=_register(VOICE), num_encodes=0),
        act("precompute it", _precompute, says='"ready"'),
        act("precompute it again", _precompute, says="already exists"),
        act("speak, first time", speak, take=usual.name),
        act("speak, warm", speak, take=usual.name),
        act("second name, same clip", _register(SECOND_VOICE)),
        act("speak, second name", _speak(voice=SECOND_VOICE), take=usual.name),
        act("speak, clip inline", inline, take=usual.name),
        *(act(f"speak, {m.name}", _speak_in(m), take=m.name) for m in others),
    )
    second = (
        Act(label="speak after restart", send=speak, num_encodes=0, take=usual.name),
        Act(label="inline after restart", send=inline, num_encodes=0, take=usual.name),
        *(
            Act(
                label=f"{mode.name} after restart",
                send=_speak_in(mode),
                num_encodes=0,
                take=mode.name,
            )
            for mode in others
        ),
    )
    return first, second


def _speak_in(mode: Mode) -> Callable[[SpeechClient], Answer]:
    named = {CLONE_MODE: mode.name}
    return _speak(voice=VOICE, extra_params=named, **mode.example)
