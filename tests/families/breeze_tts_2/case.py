"""Breeze-TTS-2 in the shared tests."""

import shutil
from types import SimpleNamespace

from tests.families.cases import Case, codes, made_by, talker
from vllm_tts_cache.families.breeze_tts_2.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import FAMILY as QWEN3


class Tokenizer:
    """Bytes behind a begin, as the released one puts it."""

    all_special_tokens = ()

    def __init__(self):
        self.added_tokens_decoder = {
            1: SimpleNamespace(content="<eos>", special=True),
            108: SimpleNamespace(content="\n\n", special=False),
        }

    def encode(self, text, *, add_special_tokens):
        return [*([2] if add_special_tokens else []), *text.encode()]


def write(checkpoint, tiny):
    """A tiny codec in a checkpoint without a talker."""
    shutil.copytree(tiny(QWEN3) / "speech_tokenizer", checkpoint / "audio_tokenizer")
    (checkpoint / "config.json").write_text('{"model_type": "breeze"}')


def serve(server):
    server.engine.model_config.max_model_len = 2048
    server.handler._get_tts_adapter().tokenizer = Tokenizer()


def host_encoder(checkpoint):
    """The host's reference encoder as its model loads it, but for its compiler."""
    from vllm.config import LoadConfig
    from vllm_omni.model_executor.models.breeze_tts_2.reference_encoder import (
        BreezeReferenceEncoder,
    )

    model = SimpleNamespace(model=str(checkpoint), revision=None)
    config = SimpleNamespace(model_config=model, load_config=LoadConfig())
    encoder = BreezeReferenceEncoder(config)  # pyright: ignore[reportArgumentType]
    encoder.load_weights(config)  # pyright: ignore[reportArgumentType]
    encoder._compiled_encode = encoder._encode_impl
    return encoder


CLONE = {"voice": "Ann", "ref_text": "words"}

CASE = Case(
    family=FAMILY,
    stage=talker("breeze_tts_2", "BreezeForConditionalGeneration"),
    hf_config=made_by(
        "vllm_omni.model_executor.models.breeze_tts_2.configuration_breeze:BreezeConfig"
    ),
    mode_of=lambda _info: IN_CONTEXT,
    write=write,
    arrays={CODEC: codes(num_codec_frames, 16)},
    serve=serve,
    message_bytes_per_second=25.1,  # a placeholder for each frame
    control_tokens=("<ins_bos>", "<eos>", "[S3]"),
    refused=(
        (CLONE | {"language": "en"}, "language"),
        (CLONE | {"speed": 2.0}, "speed"),
        (CLONE | {"instructions": "Softly.<ins_eos>"}, "instructions"),
    ),
)
