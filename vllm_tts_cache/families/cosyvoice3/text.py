"""The checkpoint's tokenizer, with the marks that the host adds to it."""

from typing import Any

from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir

_FILES = ("config.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def load_tokenizer(model: str, revision: str | None, config: Any) -> Any:
    """Return the host's tokenizer of a checkpoint.

    Args:
        model: Its folder, or a Hugging Face id.
        revision: Of the id.
        config: The host's of the checkpoint, which names the folder that it is in.

    Raises: CheckpointError that says what to download.
    """
    from vllm_omni.model_executor.models.cosyvoice3.tokenizer import get_qwen_tokenizer

    folder = str(config.qwen_pretrain_path)
    needed = [f"{folder}/{name}" for name in _FILES]
    model_dir = checkpoint_dir(model, revision, side_files=needed)
    return get_qwen_tokenizer(
        token_path=str(model_dir / folder),
        skip_special_tokens=config.skip_special_tokens,
        version=config.version,
    )
