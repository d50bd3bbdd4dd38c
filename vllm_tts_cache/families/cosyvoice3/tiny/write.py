"""Write a tiny CosyVoice3 checkpoint with random weights. Not a model."""

from pathlib import Path

import torch

from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.families.cosyvoice3.tiny.networks import (
    write_speaker_network,
    write_speech_tokenizer,
)
from vllm_tts_cache.families.cosyvoice3.tiny.weights import (
    add_flow,
    add_talker,
    add_vocoder,
)
from vllm_tts_cache.testing.tiny_checkpoint import EncoderOptions, Report
from vllm_tts_cache.testing.tiny_parts import (
    IM_END,
    WeightBuilder,
    save_json,
    save_text_tokenizer,
    train_text_tokenizer,
)

# Where the talker's config and the tokenizer are.
_TALKER_FOLDER = "CosyVoice-BlankEN"
_PARTS = {"llm.pt": add_talker, "flow.pt": add_flow, "hift.pt": add_vocoder}


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called through `TINY`.

    With ``real`` encoders the stand-ins for the ONNX files have as many weights as the
    released ones, and about as many products for a second of audio; their layers are
    simpler. All else stays tiny.
    """
    # As released, where the host goes by the folder's name.
    (directory / "config.json").write_text("{}\n")
    report("text tokenizer")
    talker = directory / _TALKER_FOLDER
    talker.mkdir()
    text = train_text_tokenizer()
    save_text_tokenizer(talker, text)
    save_json(talker / "config.json", _talker_config(text.id_of(IM_END)))
    for name, add in _PARTS.items():
        report(name)
        weights = WeightBuilder(options.seed)
        add(weights)
        # Through a file of ours: a full disk is an OSError there, not a RuntimeError.
        with (directory / name).open("wb") as file:
            torch.save(weights.tensors, file)
    report("speech tokenizer")
    write_speech_tokenizer(
        directory / "speech_tokenizer_v3.onnx",
        WeightBuilder(options.seed, "speech_tokenizer."),
        sizes.TOKENIZER[options.encoders],
    )
    report("speaker network")
    write_speaker_network(
        directory / "campplus.onnx",
        WeightBuilder(options.seed, "campplus."),
        sizes.SPEAKER[options.encoders],
    )


def _talker_config(eos_token_id: int) -> dict[str, object]:
    """Of the language model, which is a Qwen2."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes.TALKER.config,
        "vocab_size": sizes.TEXT_VOCAB_SIZE,
        "max_position_embeddings": sizes.MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
    }
