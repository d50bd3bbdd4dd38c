"""What the generic parts need to know of Higgs Audio v2."""

import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import Family, Mode, Transcript

CODEC = "codec"

MODEL_TYPE = "higgs_audio_v2"
IN_CONTEXT = Mode(name="in_context", encoders=(CODEC,), transcript=Transcript.REQUIRED)
# The checkpoint has no tokenizer that can encode. The host uses this repository's, or
# that of the folder which one of these variables names.
TOKENIZER_REPO = "k2-fsa/OmniVoice"
TOKENIZER_FOLDER = "audio_tokenizer"
TOKENIZER_VARIABLES = ("HIGGS_AUDIO_TOKENIZER_PATH", "HIGGS_AUDIO_V2_TOKENIZER_PATH")
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"

_HERE = "vllm_tts_cache.families.higgs_audio_v2"
_TALKER = f"{_HERE}.worker:CachedHiggsAudioV2Talker"


def tokenizer_folder(model_dir: Path) -> Path | None:
    """Return the folder of the audio tokenizer; None if it is not on this machine.

    It is in the checkpoint, at a variable's path, or among Hugging Face's downloads.
    """
    candidates = [model_dir / TOKENIZER_FOLDER]
    for variable in TOKENIZER_VARIABLES:
        if folder := os.environ.get(variable):  # noqa: TID251  the host reads it there
            path = Path(folder).expanduser()
            candidates += [path, path / TOKENIZER_FOLDER]
    downloaded = try_to_load_from_cache(TOKENIZER_REPO, f"{TOKENIZER_FOLDER}/{_CONFIG}")
    if isinstance(downloaded, str):
        candidates.append(Path(downloaded).parent)
    return next((folder for folder in candidates if _is_tokenizer(folder)), None)


def why_it_clones_nothing(model_dir: Path) -> str | None:
    """Say why a checkpoint clones no voices here; None if the tokenizer is there."""
    if tokenizer_folder(model_dir) is not None:
        return None
    return (
        "Higgs Audio v2 clones with an audio tokenizer that this server does not have. "
        f"Download {TOKENIZER_FOLDER}/ of {TOKENIZER_REPO}, or say in "
        f"{TOKENIZER_VARIABLES[0]} where it is, and start the server again."
    )


def _is_tokenizer(folder: Path) -> bool:
    return (folder / _WEIGHTS).exists() and config_says(
        folder, "model_type", "higgs_audio_v2_tokenizer"
    )


FAMILY = Family(
    name="higgs_audio_v2",
    short_name="higgs-v2",
    title="Higgs Audio v2",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    clones=why_it_clones_nothing,
    models={
        "HiggsAudioV2ForConditionalGeneration": _TALKER,
        "HiggsAudioV2TalkerForConditionalGeneration": _TALKER,
    },
    adapter=f"{_HERE}.adapter:CachedHiggsAudioV2Adapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:HiggsAudioV2Prompts",
    side_files=("config.json",),
    sample_rate_hz=24_000,
    failure_id=3071,  # a text id: the talker samples <|AUDIO_OUT|> and the end only
    # The second runner does not name the requests of rows, and uses its own sampler.
    needs_first_runner=True,
    # A preempted request does not resume: the host's prefills take no spoken frames.
    official="the tokenizer of transformers 5.14, behind librosa 0.11",
    never_run="a whole server (there is no tiny checkpoint yet), a GPU",
)
