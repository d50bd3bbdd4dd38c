"""Model families: the modes in which they clone, and which families are installed.

A family is plain data that the generic code reads. Its folder has one `Family`, in a
module that imports neither torch nor the host. Code that needs them is a part, named as
``"module:attribute"`` and imported where it is used. Families are found by an
entry-point group, ours and those of third parties.
"""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_tts_cache.errors import CheckpointError, ConfigError, InvalidSpeakerError
from vllm_tts_cache.logs import logger

# The field of the host's `extra_params` in which a request names a mode.
CLONE_MODE = "clone_mode"
_NOTHING: Mapping[str, Any] = MappingProxyType({})

# A file of a checkpoint, or the names that it may have.
SideFile = str | tuple[str, ...]

GROUP = "vllm_tts_cache.families"


class Transcript(StrEnum):
    """What a mode does with the transcript of the reference audio."""

    REQUIRED = "required"
    USED = "used"  # if there is one
    UNUSED = "unused"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mode:
    """A way to clone.

    Attributes:
        name: As in requests, docs and metrics.
        encoders: Names of the reference encoders whose encodings it needs.
        takes_embedding: Whether a raw speaker embedding can replace the encodings.
        stand_in: Fields of the request by which the host's own adapter recognises it.
        example: Fields that a request needs besides the voice, with values.
    """

    name: str
    encoders: tuple[str, ...]
    transcript: Transcript
    takes_embedding: bool = False
    stand_in: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    example: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneFacts:
    """Facts of a request that decide its mode.

    Attributes:
        stored_transcript: Whether the voice was registered with one.
        is_inline: Whether the reference audio came with the request.
        named: The mode that the request names.
        x_vector_only: The host's field of that name; None if it was left out.
    """

    given_transcript: bool = False
    stored_transcript: bool = False
    is_inline: bool = False
    named: str | None = None
    x_vector_only: bool | None = None


def possible_modes(family: "Family", *, has_transcript: bool) -> Sequence[Mode]:
    """Return the modes for which a request needs no transcript of its own."""
    return [
        mode
        for mode in family.modes
        if has_transcript or mode.transcript is not Transcript.REQUIRED
    ]


def _named(family: "Family", facts: CloneFacts) -> Mode:
    if facts.named is not None:
        for mode in family.modes:
            if mode.name == facts.named:
                return mode
        known = ", ".join(mode.name for mode in family.modes)
        reason = f"{family.title} has no mode {facts.named!r:.60}; it has {known}"
        raise InvalidSpeakerError(f"extra_params.{CLONE_MODE}", reason)
    if family.embedding_mode is None:
        reason = f"{family.title} has no x-vectors to clone from; leave it out"
        raise InvalidSpeakerError("x_vector_only_mode", reason)
    return family.embedding_mode


def _by_transcript(family: "Family", facts: CloneFacts) -> Mode:
    counts = facts.stored_transcript and family.stored_transcript_selects
    modes = family.modes
    if facts.x_vector_only is False:  # and not left out
        modes = tuple(mode for mode in modes if not mode.takes_embedding)
    wanted = [mode for mode in modes if mode.transcript is not Transcript.UNUSED]
    if facts.given_transcript or counts:
        return (wanted or list(modes))[0]
    plain = [mode for mode in modes if mode.transcript is not Transcript.REQUIRED]
    if not plain or (facts.is_inline and family.asks_inline_transcript):
        return wanted[0]
    return plain[0]


def _no_transcript(family: "Family", mode: Mode) -> str:
    reason = (
        f"{family.title} needs the transcript of the reference audio for a clone "
        f"of mode {mode.name!r}. Give ref_text, or register the voice with it"
    )
    others = possible_modes(family, has_transcript=False)
    if others:
        reason += f"; {others[0].name!r} needs none"
        if others[0].takes_embedding:
            reason += " (set x_vector_only_mode)"
    return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLimits:
    """The reference audio that a family takes; by default all that can be decoded."""

    min_sample_rate_hz: int = 0
    max_seconds: float = float("inf")

    def problem(self, num_samples: int, sample_rate_hz: int) -> str | None:
        """Say why the family does not take a clip and what to do; None if it does."""
        if sample_rate_hz < self.min_sample_rate_hz:
            return (
                f"its sample rate is {sample_rate_hz} Hz, and this model needs "
                f"{self.min_sample_rate_hz} Hz or more; record it again"
            )
        if (seconds := num_samples / sample_rate_hz) > self.max_seconds:
            return (
                f"it is {seconds:.1f} s long, and this model takes "
                f"{self.max_seconds:g} s at most; cut it"
            )
        return None


@dataclass(frozen=True)
class ControlTokens:
    """The tokens of a model that shape its prompts, so that no text may hold them.

    A tokenizer cuts a token out of a text wherever it is spelled. So a text could end
    its own part of the prompt, begin another speaker's, or make room for audio.

    Attributes:
        named: Names with spaces between them; refused whatever a tokenizer says.
        tags: Expression of those that are made for texts, as a laugh is. A tokenizer
            may mark them as special all the same.
    """

    named: str = ""
    tags: str = ""

    @cached_property
    def names(self) -> list[str]:
        """The names, which are all that is known without a tokenizer."""
        return self.named.split()

    def of(self, tokenizer: Any) -> list[str]:
        """Return the names, and what a tokenizer has beside them that is no tag.

        These are its special tokens, and those spelled like one; it has others, such
        as line breaks, for the sake of texts.
        """
        added = tokenizer.added_tokens_decoder.values()
        marked = {t.content for t in added if t.special or t.content.startswith("<|")}
        marked.update(tokenizer.all_special_tokens)
        return self.names + [t for t in marked if not re.fullmatch(self.tags, t)]


def refuse_tokens(tokens: Iterable[str], field: str, text: str) -> None:
    """Refuse control tokens in a text. Raises: InvalidSpeakerError naming the first."""
    for token in tokens:
        if token in text:
            reason = f"{token!r} is a control token of the model; leave it out"
            raise InvalidSpeakerError(field, reason)


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A model family, described without loading it.

    Attributes:
        short_name: As in commands: ``make demo MODEL=...``.
        modes: The ways it clones, cheapest first; none if no checkpoint of it clones.
        recognises: Tells whether a checkpoint directory belongs to it.
        clones: Says why a checkpoint of it clones no voices and what to do instead;
            None if it does.
        models: Architecture of the host -> our class in its place.
        decoders: The same for the next stage, if ours stores states of voices there.
        host_is_multimodal: Whether the host's classes take audio as vLLM's multimodal
            prompts, and ours do not: ours must then be in vLLM's registry early.
        pipelines: As `models`, for diffusion pipelines: a family has one of the two.
        waits_for_outputs_of: The host's name of its pipeline, if that is to wait for
            outputs where the host would poll for them.
        adapter: Our class in place of the host's adapter of the same name; the host has
            none for a diffusion model.
        encoders_part: ``load(model_dir, device) -> {name: ReferenceEncoder}``: all
            encoders of a checkpoint in its released layout, in float32 and in memory
            of their own, or a `CheckpointError`.
        encodes_on_cpu: Whether its encoders compute on the CPU on every machine.
        offline_part: Builds prompts for an ``Omni`` engine, see `OfflinePrompts`.
        tiny_part: ``write(directory, options, report)``: fills an empty directory with
            a tiny checkpoint, and reports each step. Equal options give equal bytes.
        tiny_options: The class of the options, `EncoderOptions` or one with more.
        deploy_file: Its stages on a CPU, for the trial commands and tests.
        side_files: Files of a checkpoint that its encoders read besides the weights
            that the host loads; of several names the preferred one first.
        failure_id: A token id that the model never samples; it ends a request whose
            prompt cannot be built. A diffusion pipeline returns an error instead.
        needs_first_runner: Whether the host's second model runner is refused at start,
            because it does not call all hooks that our talker needs.
        resumes: Whether a preempted request goes on as it would have. If not, a request
            starts only when the KV cache has room for all of it.
        plausible_tokens: If it does not resume, the number of tokens that speaking a
            text plausibly takes; None if only ``max_tokens`` bounds it.
        limits: For all clips of a voice together.
        max_clips: Clips of one voice; more than one if its official code takes several
            for one prompt, and its encoders encode each by itself.
        stored_transcript_selects: Whether a voice's own transcript chooses the mode as
            one in the request does.
        asks_inline_transcript: Whether inline audio without a transcript is refused
            unless the request names a mode that needs none.
        official: What its encodings are equal to, for people.
        shares_kv: Whether requests of a voice share its part of the prompt in the KV.
        never_run: What was never run, for people.
        is_default: Whether commands that name no family use this one.
    """

    name: str
    short_name: str
    title: str
    modes: tuple[Mode, ...]
    recognises: Callable[[Path], bool]
    clones: Callable[[Path], str | None] = lambda _model_dir: None
    models: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    decoders: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    host_is_multimodal: bool = False
    pipelines: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    waits_for_outputs_of: str = ""
    adapter: str
    encoders_part: str = ""
    encodes_on_cpu: bool = False
    offline_part: str = ""
    tiny_part: str = ""
    tiny_options: str = "vllm_tts_cache.testing.tiny_checkpoint:EncoderOptions"
    deploy_file: Path | None = None
    side_files: tuple[SideFile, ...] = ()
    sample_rate_hz: int
    control: ControlTokens = ControlTokens()
    failure_id: int | None = None
    needs_first_runner: bool = False
    resumes: bool = False
    plausible_tokens: Callable[[str], int] | None = None
    limits: ClipLimits = ClipLimits()
    max_clips: int = 1
    stored_transcript_selects: bool = True
    asks_inline_transcript: bool = False
    official: str = ""
    shares_kv: bool = False
    never_run: str = ""
    is_default: bool = False

    @property
    def command_names(self) -> tuple[str, ...]:
        """The names by which commands take the family."""
        return tuple(dict.fromkeys((self.short_name, self.name.replace("_", "-"))))

    @cached_property
    def encoders(self) -> tuple[str, ...]:
        """Names of all its reference encoders."""
        return _encoders_of(self.modes)

    @cached_property
    def embedding_mode(self) -> Mode | None:
        """The mode of a raw speaker embedding, if it has one."""
        return next((mode for mode in self.modes if mode.takes_embedding), None)

    def mode(self, facts: CloneFacts) -> Mode:
        """Choose a mode: the one that the request names, else by the transcript.

        Raises: InvalidSpeakerError if the family has no such mode, or it needs a
            transcript that is missing.
        """
        is_named = facts.named is not None or facts.x_vector_only
        mode = (_named if is_named else _by_transcript)(self, facts)
        has_transcript = facts.given_transcript or facts.stored_transcript
        if mode.transcript is Transcript.REQUIRED and not has_transcript:
            raise InvalidSpeakerError("ref_text", _no_transcript(self, mode))
        return mode

    def precomputed(self, *, has_transcript: bool) -> tuple[str, ...]:
        """Return the encoders of every mode that a request for this voice may use.

        If all modes need a transcript, it may come with the request.
        """
        modes = possible_modes(self, has_transcript=has_transcript) or self.modes
        return _encoders_of(modes)

    def part(self, name: str) -> Any:
        """Import a part by the name of its field.

        Raises: ImportError, AttributeError.
        """
        return pkgutil.resolve_name(getattr(self, name))


def _encoders_of(modes: Sequence[Mode]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for mode in modes for name in mode.encoders))


@cache
def families() -> tuple[Family, ...]:
    """Return all installed families, the default one first.

    One that cannot be imported is left out with a warning.
    """
    found: dict[str, Family] = {}
    for entry in metadata.entry_points(group=GROUP):
        try:
            family = entry.load()
        except Exception as exc:  # noqa: BLE001  a third party's code
            logger.warning("Model family %s is left out: %s", entry.name, exc)
            continue
        if found.setdefault(family.name, family) is not family:
            logger.warning("A second model family %s is left out", family.name)
    return tuple(sorted(found.values(), key=lambda f: (not f.is_default, f.name)))


def family_of_checkpoint(model_dir: Path) -> Family:
    """Return the family of a checkpoint.

    Raises: CheckpointError if no installed family recognises it.
    """
    for family in families():
        if family.recognises(model_dir):
            return family
    known = ", ".join(family.title for family in families())
    raise CheckpointError(str(model_dir), f"is of no family that we know: {known}")


@cache
def family_of_model(*architectures: str | None) -> Family | None:
    """Return the family of one of these models or pipelines of the host's, if any."""
    for family in families():
        if not {*family.models, *family.pipelines}.isdisjoint(architectures):
            return family
    return None


def clips_problem(family: Family | None, num_clips: int) -> str | None:
    """Say why a model takes no voice of so many clips and what to do, else None.

    A model without a family takes one.
    """
    max_clips, title = (family.max_clips, family.title) if family else (1, "this model")
    if num_clips <= max_clips:
        return None
    advice = f"{max_clips} to a voice at most; leave some out"
    if max_clips == 1:
        advice = "one clip to a voice; join them into one, or choose the best"
    return f"there are {num_clips} clips, and {title} takes {advice}"


def trial_families() -> dict[str, Family]:
    """Return the families with a tiny checkpoint, by each of their command names."""
    return {
        name: family
        for family in families()
        if family.tiny_part
        for name in family.command_names
    }


def default_family() -> Family:
    """Return the family for commands that name none.

    Raises: ConfigError if none is installed.
    """
    if not (trial := trial_families()):
        raise ConfigError("no model family is installed; run `make setup` again")
    return next(iter(trial.values()))
