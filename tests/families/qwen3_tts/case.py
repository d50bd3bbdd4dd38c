"""Qwen3-TTS in the shared tests."""

import json
import shutil

import numpy as np

from tests.families.cases import Case, codes, read_by, talker
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import (
    CODEC,
    FAMILY,
    IN_CONTEXT,
    SPEAKER,
    X_VECTOR,
)


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
    stage=talker("qwen3_tts", "Qwen3TTSTalkerForConditionalGeneration"),
    hf_config=read_by(
        "vllm_omni.model_executor.models.qwen3_tts"
        ".configuration_qwen3_tts:Qwen3TTSConfig"
    ),
    mode_of=mode_of,
    weights=("model.safetensors", "speech_tokenizer/model.safetensors"),
    arrays={
        SPEAKER: lambda _audio: {"speaker_embedding": np.zeros(128, np.float32)},
        CODEC: codes(num_codec_frames, 16),
    },
    control_tokens=("<|im_end|>", "<tts_text_eod>"),
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
