"""Qwen3-TTS in the shared tests."""

import json
import shutil

from tests.families.cases import Case
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import CODEC, FAMILY, IN_CONTEXT, X_VECTOR


def hf_config(checkpoint):
    from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
        Qwen3TTSConfig,
    )

    return Qwen3TTSConfig.from_pretrained(checkpoint)


def mode_of(info):
    return X_VECTOR if info.get("x_vector_only_mode", [False])[0] else IN_CONTEXT


def of_another_kind(kind, presets):
    """Return what writes a checkpoint that is not Base; the weights stay Base's."""

    def write(directory, tiny):
        shutil.copytree(tiny(FAMILY), directory)
        config = json.loads((directory / "config.json").read_text())
        config["tts_model_type"] = kind
        config["talker_config"]["spk_id"] = presets
        (directory / "config.json").write_text(json.dumps(config))

    return write


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "qwen3_tts",
        "model_arch": "Qwen3TTSTalkerForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=mode_of,
    announced={CODEC: num_codec_frames},
    message_bytes_per_second=2 * 12.5,  # a placeholder for each frame
    second_server={
        "arguments": ("--api-server-count", "2"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # The first server has them, and what is heard is compared.
        "SPEAKER_CACHE_DECODER_MAX_BYTES": 0,
    },
    does=frozenset({"raw_embeddings", "two_api_processes", "keeps_decoder_states"}),
    refusing={
        "custom voice": of_another_kind("custom_voice", {"ryan": 3061, "vivian": 3065}),
        "voice design": of_another_kind("voice_design", {}),
    },
)
