"""Audio8 TTS in the shared tests."""

from tests.families.cases import Case, codes, made_by, talker
from tests.families.fish_speech.case import num_frames
from vllm_tts_cache.families.audio8_tts.family import CODEC, FAMILY, IN_CONTEXT


class Tokenizer:
    """Bytes."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


def write(checkpoint, _tiny):
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "arktts"}')


def stand_in(directory):
    from tests.families.audio8_tts import voices

    return voices.stand_in(directory)


def serve(server):
    server.handler._get_tts_adapter()._cached_tokenizer = Tokenizer()


CASE = Case(
    family=FAMILY,
    stage=talker("audio8_tts_slow_ar", "Audio8TTSSlowARForConditionalGeneration"),
    hf_config=made_by(
        "vllm_omni.model_executor.models.audio8_tts"
        ".configuration_audio8_tts:Audio8TTSConfig"
    ),
    mode_of=lambda _info: IN_CONTEXT,
    write=write,
    stand_in=stand_in,
    arrays={CODEC: codes(num_frames, 10)},
    serve=serve,
    message_bytes_per_second=7 * 21.6,
    control_tokens=("<|im_end|>", "<|semantic:3|>", "<|" * 65, "a" * 16_385),
)
