"""Write a tiny Qwen3-TTS Base checkpoint with random weights. Not a model.

Every field of its JSON files is written even where it equals a default, because the
defaults of the official package's transformers and of the host's are not the same.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderOptions,
    EncoderSize,
    Report,
    TransformerSizes,
)
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

Json = dict[str, Any]

# Fixed by the released models, whatever the size of the networks.
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920
NUM_CODEBOOKS = 16
CODEBOOK_SIZE = 2_048
TALKER_VOCAB_SIZE = 3_072

_HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
TALKER = TransformerSizes(hidden=128, intermediate=256, num_layers=2, **_HEADS)
CODE_PREDICTOR = TransformerSizes(hidden=128, intermediate=256, num_layers=1, **_HEADS)
TEXT_HIDDEN = 64


def _codec_transformer(
    hidden: int, intermediate: int, num_layers: int, num: int, head_dim: int
) -> TransformerSizes:
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_layers": num_layers}
    heads = {"num_heads": num, "num_kv_heads": num, "head_dim": head_dim}
    return TransformerSizes(**sizes, **heads)


_TINY = _codec_transformer(64, 128, 2, 2, 32)
_REAL_DECODER = _codec_transformer(1024, 3072, 8, 16, 64)
_REAL_ENCODER = _codec_transformer(512, 2048, 8, 8, 64)

# The 12 Hz codec's causal decoder: its transformer, codebook_dim, latent_dim and
# decoder_dim.
CODEC_DECODER: dict[EncoderSize, tuple[TransformerSizes, int, int, int]] = {
    "tiny": (_TINY, 64, 64, 64),
    "real": (_REAL_DECODER, 512, 1024, 1536),
}

# ECAPA-TDNN: channels, of which the last are the aggregation's, and inner channels.
SPEAKER_ENCODER: dict[EncoderSize, tuple[list[int], int]] = {
    "tiny": ([32, 32, 32, 32, 96], 16),
    "real": ([512, 512, 512, 512, 1536], 128),
}

# Mimi's encoder: its transformer, num_filters, codebook_dim and num_quantizers. The
# released one has 32 codebooks, of which the first 16 are used.
CODEC_ENCODER: dict[EncoderSize, tuple[TransformerSizes, int, int, int]] = {
    "tiny": (_TINY, 4, 32, NUM_CODEBOOKS),
    "real": (_REAL_ENCODER, 64, 256, 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(EncoderOptions):
    """Equal options give byte-identical files.

    With ``real`` encoders the 12 Hz codec encoder and the speaker encoder have their
    released sizes, so that encoding a reference costs what it does in production; the
    talker stays tiny.

    Attributes:
        real_decoder: Gives the codec's decoder its released size, so that speaking
            costs what it does in production after the talker.
        eos_logit: Mean logit of the end of speech once the text is over. The other
            codes have a standard deviation of 1, so at temperature 0.9 and top-k 50
            the default ends about 7 % of the frames.
    """

    real_decoder: bool = False
    eos_logit: float = 3.6


CODEC_EOS_ID = 2150
TTS_PAD, TTS_BOS, TTS_EOS = "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"
ALL_SPECIAL_TOKENS = (
    *(*parts.SPECIAL_TOKENS, TTS_PAD, TTS_BOS, TTS_EOS),
    *("<tts_text_bos_single>", "<|audio_start|>", "<|audio_end|>"),
)
_LANGUAGES = (
    *("chinese", "english", "german", "italian", "portuguese"),
    *("spanish", "japanese", "korean", "french", "russian"),
)


def model_config(ids: Mapping[str, int], encoders: EncoderSize) -> Json:
    """Return ``config.json``; ``ids`` are those of the text's tokens."""
    channels, inner = SPEAKER_ENCODER[encoders]
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "bfloat16",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "base",
        "im_start_token_id": ids[parts.IM_START],
        "im_end_token_id": ids[parts.IM_END],
        "tts_pad_token_id": ids[TTS_PAD],
        "tts_bos_token_id": ids[TTS_BOS],
        "tts_eos_token_id": ids[TTS_EOS],
        "talker_config": {
            "model_type": "qwen3_tts_talker",
            **_transformer(TALKER),
            "vocab_size": TALKER_VOCAB_SIZE,
            "text_vocab_size": len(ids),
            "text_hidden_size": TEXT_HIDDEN,
            "num_code_groups": NUM_CODEBOOKS,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "rope_scaling": {
                "interleaved": True,
                "mrope_section": [12, 10, 10],
                "rope_type": "default",
                "type": "default",
            },
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "position_id_per_seconds": 12.5,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "codec_eos_token_id": CODEC_EOS_ID,
            "codec_think_id": 2154,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_language_id": {name: 2050 + i for i, name in enumerate(_LANGUAGES)},
            "spk_id": {},
            "spk_is_dialect": {},
            "code_predictor_config": {
                "model_type": "qwen3_tts_talker_code_predictor",
                **_transformer(CODE_PREDICTOR),
                "vocab_size": CODEBOOK_SIZE,
                "num_code_groups": NUM_CODEBOOKS,
                "hidden_act": "silu",
                "max_position_embeddings": 65_536,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000,
                "rope_scaling": None,
                "layer_types": ["full_attention"] * CODE_PREDICTOR.num_layers,
                "use_sliding_window": False,
                "max_window_layers": CODE_PREDICTOR.num_layers,
                "tie_word_embeddings": False,
            },
        },
        "speaker_encoder_config": {
            "mel_dim": 128,
            # The embedding stands in the prompt beside the talker's own.
            "enc_dim": TALKER.hidden,
            "enc_channels": channels,
            "enc_attention_channels": inner,
            "enc_se_channels": inner,
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_res2net_scale": 8,
            "sample_rate": SAMPLE_RATE_HZ,
        },
    }


GENERATION: Json = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}

TEXT_PREPROCESSOR: Json = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}


def speech_tokenizer_config(encoders: EncoderSize, decoder: EncoderSize) -> Json:
    """Return ``speech_tokenizer/config.json``."""
    encoder, num_filters, codebook_dim, num_quantizers = CODEC_ENCODER[encoders]
    transformer, decoder_codebook_dim, latent_dim, decoder_dim = CODEC_DECODER[decoder]
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "dtype": "float32",
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "encoder_valid_num_quantizers": NUM_CODEBOOKS,
        "encoder_config": {
            "model_type": "mimi",
            **_transformer(encoder),
            "_frame_rate": SAMPLE_RATE_HZ / SAMPLES_PER_FRAME,
            "sampling_rate": SAMPLE_RATE_HZ,
            "audio_channels": 1,
            "num_filters": num_filters,
            "num_residual_layers": 1,
            "upsampling_ratios": [8, 6, 5, 4],
            "kernel_size": 7,
            "last_kernel_size": 3,
            "residual_kernel_size": 3,
            "dilation_growth_rate": 2,
            "compress": 2,
            "use_causal_conv": True,
            "use_conv_shortcut": False,
            "use_streaming": False,
            "pad_mode": "constant",
            "trim_right_ratio": 1.0,
            "upsample_groups": encoder.hidden,
            "codebook_size": CODEBOOK_SIZE,
            "codebook_dim": codebook_dim,
            "vector_quantization_hidden_dimension": codebook_dim,
            "num_quantizers": num_quantizers,
            "num_semantic_quantizers": 1,
            "hidden_act": "gelu",
            "max_position_embeddings": 8_000,
            "sliding_window": 250,
            "rope_theta": 10_000.0,
            "layer_scale_initial_scale": 0.01,
            "norm_eps": 1e-5,
        },
        "decoder_config": {
            **_transformer(transformer),
            "codebook_size": CODEBOOK_SIZE,
            "codebook_dim": decoder_codebook_dim,
            "latent_dim": latent_dim,
            "decoder_dim": decoder_dim,
            "num_quantizers": NUM_CODEBOOKS,
            "num_semantic_quantizers": 1,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "hidden_act": "silu",
            "max_position_embeddings": 8_000,
            "sliding_window": 72,
            "rope_theta": 10_000,
            "layer_scale_initial_scale": 0.01,
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.0,
        },
    }


AUDIO_PREPROCESSOR: Json = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": SAMPLE_RATE_HZ,
    "chunk_length_s": None,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def _transformer(size: TransformerSizes) -> Json:
    return {**size.config, "head_dim": size.head_dim, "attention_bias": False}


def write(directory: Path, options: CheckpointOptions, report: Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``."""
    report("text tokenizer")
    ids = parts.write_text_tokenizer(directory, ALL_SPECIAL_TOKENS)
    report("talker and speaker encoder")
    weights = WeightBuilder(options.seed)
    add_talker(weights, len(ids), ids[TTS_PAD], options.eos_logit)
    config = model_config(ids, options.encoders)
    add_speaker_encoder(weights, config["speaker_encoder_config"])
    parts.save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    parts.save_json(directory / "config.json", config)
    parts.save_json(directory / "generation_config.json", GENERATION)
    parts.save_json(directory / "preprocessor_config.json", TEXT_PREPROCESSOR)
    report("speech tokenizer")
    codec = directory / "speech_tokenizer"
    codec.mkdir()
    weights = WeightBuilder(options.seed)
    decoder = "real" if options.real_decoder else "tiny"
    config = speech_tokenizer_config(options.encoders, decoder)
    add_codec_encoder(weights, config["encoder_config"])
    add_codec_decoder(weights, config["decoder_config"])
    parts.save_weights(codec / "model.safetensors", weights.tensors, torch.float32)
    parts.save_json(codec / "config.json", config)
    parts.save_json(codec / "preprocessor_config.json", AUDIO_PREPROCESSOR)


_TEXT_OVER = 0
# One frame is the sum of 16 code embeddings and a text embedding; at these sizes
# the codes and the text weigh about the same.
_CODE_STD = 0.125
_TEXT_STD = 0.5
# Weight of the query and key norms. Diffuse attention dilutes the one position that
# holds the speaker among hundreds.
_RULES = {"[qk]_norm": parts.constant(2.0)}
_LAYER_GAIN = 1.5  # of every projection in the talker's layers
_PROJECT = parts.projected(_LAYER_GAIN)
# Mean, measured, of channel 0 behind the talker's last norm once the text is over.
_NORMED_TEXT_OVER = 0.265


def add_talker(
    weights: WeightBuilder, text_vocab_size: int, pad_id: int, eos_logit: float
) -> None:
    """Add everything below ``talker.``, the code predictor's weights among it.

    A random talker says nothing about when to stop, and the host answers a speech that
    never ends with an error. So one channel of the residual stream is not random:
    channel 0 is 1 where the talker is fed the padding that follows a text, and 0
    elsewhere; no layer writes to it, and the logit of the end of speech is read from it
    alone. An utterance therefore lasts as long as its text, and then ends by chance.
    ``eos_logit`` is the mean logit of the end of speech from then on.
    """
    talker = weights.under("talker")
    model = talker.under("model")
    rules = {"(o|down)_proj": _add_silenced, **_RULES}
    parts.add_layers(model, TALKER, "qwen3", _PROJECT, rules)
    shape = TALKER_VOCAB_SIZE, TALKER.hidden
    codes = model.normal("codec_embedding.weight", shape, _CODE_STD)
    codes[:, _TEXT_OVER] = 0
    _add_text(talker, text_vocab_size, pad_id)
    head = talker.projection("codec_head.weight", shape)
    head[:, _TEXT_OVER] = 0
    head[CODEC_EOS_ID] = 0
    head[CODEC_EOS_ID, _TEXT_OVER] = eos_logit / _NORMED_TEXT_OVER
    _add_code_predictor(talker.under("code_predictor"))


def _add_text(talker: WeightBuilder, vocab_size: int, pad_id: int) -> None:
    """Add the text embedding and its projection; channel 0 is for padding only."""
    width, hidden = TEXT_HIDDEN, TALKER.hidden
    embedding = talker.normal("model.text_embedding.weight", (vocab_size, width), 1.0)
    embedding[:, _TEXT_OVER] = 0
    embedding[pad_id, _TEXT_OVER] = 1
    projection = talker.under("text_projection")
    first, _ = projection.linear("linear_fc1", width, width)
    second, _ = projection.linear("linear_fc2", width, hidden, 2 * _TEXT_STD)
    for weight in (first, second):
        weight[_TEXT_OVER] = 0
        weight[:, _TEXT_OVER] = 0
        weight[_TEXT_OVER, _TEXT_OVER] = 1
    second[_TEXT_OVER, _TEXT_OVER] /= silu(torch.tensor(1.0))


def _add_code_predictor(predictor: WeightBuilder) -> None:
    shape = CODEBOOK_SIZE, CODE_PREDICTOR.hidden
    model = predictor.under("model")
    parts.add_layers(model, CODE_PREDICTOR, "qwen3", _PROJECT, _RULES)
    for book in range(NUM_CODEBOOKS - 1):
        name = f"model.codec_embedding.{book}.weight"
        predictor.normal(name, shape, _CODE_STD)[:, _TEXT_OVER] = 0
        predictor.projection(f"lm_head.{book}.weight", shape, 2.0)


def _add_silenced(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    layer.projection(name, shape, _LAYER_GAIN)[_TEXT_OVER] = 0


# Speech has a standard deviation of about 0.1; the layers behind work at about 1.
_INPUT_GAIN = 25.0
# Latents that spread a few times as wide as the codebooks fall on many entries.
_LATENT_GAIN = 3.0
# How much a layer of the decoder's transformer adds, as at the start of a training.
_LAYER_SCALE = 0.01
# The encoder's layers add more: 0.01 would hide any difference in attention.
_ENCODER_LAYER_SCALE = 0.3
# Bounds of the logarithm of a codebook entry's usage, which every reader divides by.
_CLUSTER_USAGE = (-2.0, 6.0)
# Carries a signal through the speaker encoder's rectifiers undamped.
_SPEAKER_GAIN = 2**0.5
_SPEAKER_EMBEDDING_GAIN = 0.5  # of its last layer, on pooled features
# The decoder clips its output to [-1, 1]; at this gain hardly a sample is clipped.
_OUTPUT_GAIN = 0.05


def add_speaker_encoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``speaker_encoder.``; Qwen2.5-Omni has the same network."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniDiTConfig,
    )
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        ECAPA_TimeDelayNet,
    )

    shapes = parts.shapes_of(ECAPA_TimeDelayNet, Qwen2_5OmniDiTConfig(**config))
    parts.add_all(weights.under("speaker_encoder"), shapes, _SPEAKER_RULES)


def add_codec_encoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``encoder.``: what Mimi has, without its decoder."""
    from transformers import MimiConfig, MimiModel

    shapes = parts.shapes_of(MimiModel, MimiConfig(**config))
    shapes = {n: s for n, s in shapes.items() if not re.match("decoder|upsample", n)}
    parts.add_all(weights.under("encoder"), shapes, _ENCODER_RULES)


def _add_usage(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> Tensor:
    return codebook.log_uniform(name, shape, *_CLUSTER_USAGE)


def _add_sums(codebook: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    """Add a codebook's entries, each times its usage, which is drawn once more."""
    total = codebook.normal(name, shape, 1.0)
    usage_name = name.replace("embed_sum", "cluster_usage")
    total *= _add_usage(codebook, usage_name, shape[:1])[:, None]


_SPEAKER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"^fc\.": parts.centred(_SPEAKER_EMBEDDING_GAIN),
    "": parts.centred(_SPEAKER_GAIN),
}
_ENCODER_RULES: dict[str, parts.Draw] = {
    "bias$": parts.constant(0.0),
    r"(layernorm\.weight|initialized)$": parts.constant(1.0),
    "layer_scale": parts.constant(_ENCODER_LAYER_SCALE),
    "cluster_usage$": _add_usage,
    "embed_sum$": _add_sums,
    r"input_proj\.": parts.projected(_LATENT_GAIN),
    r"layers\.0\.conv\.": parts.projected(_INPUT_GAIN),
    r"conv\.": parts.centred(),
    "": parts.projected(),
}


def add_codec_decoder(weights: WeightBuilder, config: Json) -> None:
    """Add everything below ``decoder.``: Qwen3-Omni's, with other layers before it."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeCode2Wav,
    )

    decoder = weights.under("decoder")
    shapes = parts.shapes_of(Qwen3OmniMoeCode2Wav, Qwen3OmniMoeCode2WavConfig(**config))
    del shapes["code_embedding.weight"]
    parts.add_all(decoder, shapes, _DECODER_RULES)
    names = "codebook_dim", "latent_dim", "hidden_size"
    inputs, latent, hidden = (config[name] for name in names)
    _add_quantizer(decoder.under("quantizer.rvq_first"), inputs, 1)
    _add_quantizer(decoder.under("quantizer.rvq_rest"), inputs, NUM_CODEBOOKS - 1)
    decoder.conv("pre_conv.conv", (latent, inputs, 3))
    decoder.linear("pre_transformer.input_proj", latent, hidden)
    decoder.linear("pre_transformer.output_proj", hidden, latent)


def _add_quantizer(quantizer: WeightBuilder, width: int, num_books: int) -> None:
    dim = width // 2
    quantizer.projection("input_proj.weight", (dim, width, 1))
    gain = 1 / math.sqrt(num_books)
    quantizer.projection("output_proj.weight", (width, dim, 1), gain)
    for book in range(num_books):
        codebook = quantizer.under(f"vq.layers.{book}._codebook")
        codebook.fill("cluster_usage", (CODEBOOK_SIZE,), 1.0)
        codebook.normal("embedding_sum", (CODEBOOK_SIZE, dim), 1.0)


def _transposed(num_taps: int) -> parts.Draw:
    """Return a `Draw` of a transposed convolution ``(in, out, kernel)``.

    ``num_taps``, its kernel over its stride, taps of each input meet in an output.
    """
    return lambda weights, name, shape: weights.normal(
        name, shape, 1 / math.sqrt(shape[0] * num_taps)
    )


_DECODER_RULES: dict[str, parts.Draw] = {
    "(bias|alpha|beta)$": parts.constant(0.0),
    r"norm\.weight$": parts.constant(1.0),
    "(layer_scale|gamma)": parts.constant(_LAYER_SCALE),
    r"^upsample\.\d\.0\.": _transposed(1),
    r"block\.1\.conv\.": _transposed(2),
    r"conv\d\.conv\.": parts.projected(0.5),  # of residual units
    # Centred, because the activations before it are never negative: no offset.
    r"^decoder\.[1-9]\.conv\.": parts.centred(_OUTPUT_GAIN),
    "": parts.projected(),
}
