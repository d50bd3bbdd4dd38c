"""The host's models that clone without us, or not at all: what there is to say of them.

Their requests are the host's, unchanged. What is here is only what the voices routes
tell, and refuse: a voice that no request could ever speak with is not stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Of MOSS's checkpoints, which one adapter serves, those that speak as a text says.
_MOSS_WITHOUT_CLIPS = frozenset({"sound_effect", "voice_generator"})


def _always(_adapter: Any) -> bool:
    return True


def _never(_adapter: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """A model of the host's that no family of ours serves.

    Attributes:
        title: As people call it.
        takes_clips: Whether the host speaks with voices that were registered by a
            clip, from its adapter: some serve several checkpoints.
        takes_embeddings: Likewise by a raw embedding.
    """

    title: str
    takes_clips: Callable[[Any], bool] = _always
    takes_embeddings: bool = False

    def note(self, adapter: Any) -> str:
        """Say in a sentence what becomes of reference audio on this model."""
        if not self.takes_clips(adapter):
            return (
                f"{self.title} speaks with no voice that is registered by a clip, so "
                "none is stored for it."
            )
        return (
            f"{self.title} is not among the models whose reference audio is cached "
            "here: the host reads a voice's clip anew, so there is nothing to "
            "precompute."
        )


# By the host's names of their adapters. A model of the host's that is neither here nor
# a family is taken for one that can all of it: see `of_model`.
OTHER_MODELS: Mapping[str, OtherModel] = {
    "audex": OtherModel(title="Audex", takes_clips=_never),
    "audex_tta": OtherModel(title="Audex TTA", takes_clips=_never),
    "covo_audio": OtherModel(title="Covo-Audio", takes_clips=_never),
    "gepard": OtherModel(title="Gepard", takes_clips=_never),
    "glm_tts": OtherModel(title="GLM-TTS"),
    "indextts2": OtherModel(title="IndexTTS 2"),
    "indextts2_5": OtherModel(title="IndexTTS 2.5"),
    # Its embeddings come with a request, and never from a registered voice.
    "ming_flash_omni_tts": OtherModel(title="Ming-flash-omni TTS", takes_clips=_never),
    "ming_tts": OtherModel(title="Ming TTS", takes_embeddings=True),
    "minimax_music3": OtherModel(title="MiniMax Music 3", takes_clips=_never),
    "moss_tts": OtherModel(
        title="MOSS-TTS",
        takes_clips=lambda adapter: adapter._moss_variant not in _MOSS_WITHOUT_CLIPS,
    ),
    "moss_tts_nano": OtherModel(title="MOSS-TTS-Nano"),
    "step_audio2": OtherModel(title="Step-Audio2", takes_clips=_never),
}
_UNKNOWN = OtherModel(title="This model", takes_embeddings=True)


def of_model(adapter_name: str | None) -> OtherModel:
    """Return what is known of the model whose adapter the host calls so."""
    return OTHER_MODELS.get(adapter_name or "", _UNKNOWN)


def without_voices(title: str) -> OtherModel:
    """Return what there is to say of a model that no registered voice can speak on."""
    return OtherModel(title=title, takes_clips=_never)
