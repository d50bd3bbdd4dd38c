"""What an encoded voice takes, in memory, on disk and on the card.

By family and clip length, in the sizes of released checkpoints.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (
    FishSpeechSlowARConfig,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    configuration_qwen3_tts_tokenizer_v2 as codec_config,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as codec,
)

from benchmarks.bench import Bench, clip
from benchmarks.measure import Row, Summary
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.fish_speech.family import FAMILY as FISH_SPEECH
from vllm_tts_cache.families.qwen3_tts import tiny
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes
from vllm_tts_cache.model_executor.decoder_states import DecoderStates
from vllm_tts_cache.speaker.family import Family, families
from vllm_tts_cache.store.encoding import (
    Encoding,
    EncodingKey,
    audio_to_bytes,
    encoding_to_bytes,
)
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

NAME = "voice_cost"
SECONDS, QUICK_SECONDS = (3, 10, 30), (3,)
_FINGERPRINT = "0" * 64
# A tiny checkpoint's speaker embedding is as short as its talker is small.
EMBEDDING, EMBEDDING_SIZE = "speaker_embedding", 2_048  # of Qwen3-TTS 1.7B
CARD_BYTES_PER_VALUE = 2  # bfloat16


def run(bench: Bench) -> list[Row]:
    """Encode one clip of each length with each family's encoders."""
    rows: list[Row] = []
    seconds = bench.pick(full=SECONDS, quick=QUICK_SECONDS)
    for family in families():
        if not (family.encoders_part and family.tiny_part):
            continue
        bench.step(f"{NAME}: {family.title}")
        with tempfile.TemporaryDirectory(dir=bench.work) as directory:
            rows += _rows_of(family, Path(directory), seconds)
    return [*rows, _decoder_row(), *map(_audio_row, seconds)]


def _rows_of(family: Family, directory: Path, seconds: tuple[int, ...]) -> list[Row]:
    model_dir = TinyCheckpoint(family).ensure(directory / "checkpoint")
    encoders = family.part("encoders_part")(model_dir, torch.device("cpu"))
    rows: list[Row] = []
    for length in seconds:
        audio = decode(clip(length, 1)).audio
        key = EncodingKey(
            audio_sha256=audio.audio_sha256, encoder_fingerprint=_FINGERPRINT
        )
        try:
            found = [_as_released(each.encode(audio)) for each in encoders.values()]
        except TTSCacheError:  # the family takes shorter clips
            continue
        in_memory = sum(encoding.num_bytes for encoding in found)
        on_disk = sum(len(encoding_to_bytes(key, each)) for each in found)
        for where, num_bytes in (("in memory", in_memory), ("on disk", on_disk)):
            what = f"{family.name}: encodings of a {length} s clip, {where}"
            rows.append(_row(what, num_bytes))
        if family is FISH_SPEECH:
            (encoding,) = found
            num_bytes = max(encoding["codes"].shape) * _kv_bytes_per_position()
            what = f"{family.name}: KV of a {length} s clip, on the card"
            rows.append(_row(what, num_bytes, note="its transcript not counted"))
    return rows


def _as_released(encoding: Encoding) -> Encoding:
    arrays = dict(encoding.arrays)
    if EMBEDDING in arrays:
        arrays[EMBEDDING] = np.resize(arrays[EMBEDDING], EMBEDDING_SIZE)
    return Encoding(arrays)


def _kv_bytes_per_position() -> int:
    talker = FishSpeechSlowARConfig()
    per_layer = 2 * talker.num_key_value_heads * talker.head_dim
    return talker.num_hidden_layers * per_layer * CARD_BYTES_PER_VALUE


def _decoder_row() -> Row:
    """The state of Qwen3-TTS's decoder, in its released size."""
    written = tiny.speech_tokenizer_config("tiny", "real")
    config = codec_config.Qwen3TTSTokenizerV2DecoderConfig(**written["decoder_config"])
    decoder = codec.Qwen3TTSTokenizerV2Decoder(config).to(torch.bfloat16).eval()
    states = DecoderStates(max_bytes=1 << 30)
    frames = config.num_quantizers, config.sliding_window
    DecoderPrefixes(decoder, states).begin(torch.zeros(frames).long(), _FINGERPRINT)
    what = "qwen3_tts: the decoder's state of a clip of any length, on the card"
    return _row(what, states.stats(0).bytes)


def _audio_row(length: int) -> Row:
    what = f"any model: the {length} s clip itself, 44.1 kHz of 16 bit, on disk"
    return _row(what, len(audio_to_bytes(decode(clip(length, 1)))))


def _row(what: str, num_bytes: int, note: str = "") -> Row:
    summary = Summary.of([num_bytes])
    return Row(what, "bytes", summary, no_stock="keeps no file", note=note)
