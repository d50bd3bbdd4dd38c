"""What of the examples can be checked without what they need."""

from pathlib import Path

import yaml

from vllm_tts_cache.config import VARIABLES

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_compose_file_serves_as_the_command_line_does(monkeypatch):
    whole = yaml.safe_load((EXAMPLES / "open-webui/compose.yaml").read_text())
    speech, chat = whole["services"]["speech"], whole["services"]["chat"]
    ours = {name for name in speech["environment"] if name.startswith("SPEAKER_")}
    assert ours <= set(VARIABLES)
    named = "--served-model-name=" + chat["environment"]["AUDIO_TTS_MODEL"]
    assert named in speech["command"] and "--omni" in speech["command"]
