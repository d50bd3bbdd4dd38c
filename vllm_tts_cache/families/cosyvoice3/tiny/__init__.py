"""A tiny CosyVoice3 checkpoint with random weights. Not a model."""

from pathlib import Path

from vllm_tts_cache.families.cosyvoice3.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import Report, TinyWriter


def _write(directory: Path, options: CheckpointOptions, report: Report) -> None:
    # Only here: it imports torch.
    from vllm_tts_cache.families.cosyvoice3.tiny.write import write

    write(directory, options, report)


TINY = TinyWriter(options=CheckpointOptions(), write=_write)
