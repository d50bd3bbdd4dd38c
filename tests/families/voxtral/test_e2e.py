"""A real server on a tiny Voxtral checkpoint: presets speak, and clones are refused."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.families.voxtral.tiny_checkpoint import PRESETS
from vllm_tts_cache.families.voxtral.family import FAMILY
from vllm_tts_cache.testing.client import SpeechClient, data_url
from vllm_tts_cache.testing.server import Server, ServerOptions

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_FRAMES = 12
SAMPLES_PER_FRAME = 1920
BYTES_PER_SAMPLE = 2


def on_a_cpu(core, **more):
    """What keeps a stage small, and off the other's core."""
    return {
        "env": {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "TORCHDYNAMO_DISABLE": "1",
        },
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 64 * 1024**2,
        "enforce_eager": True,
        "async_scheduling": False,
        **more,
    }


@pytest.fixture(scope="module")
def server(voxtral_checkpoint, tmp_path_factory):
    """The host's own deploy file, on a CPU."""
    folder = tmp_path_factory.mktemp("voxtral-server")
    spec = find_spec("vllm_omni")
    assert spec is not None and spec.origin is not None
    deploy_file = {
        "base_config": str(Path(spec.origin).parent / "deploy" / "voxtral_tts.yaml"),
        "model_runner": "v1",
        "dtype": "bfloat16",
        "stages": [
            {"stage_id": 0, **on_a_cpu(0, max_num_batched_tokens=4096)},
            {"stage_id": 1, **on_a_cpu(1)},
        ],
    }
    path = folder / "deploy.yaml"
    path.write_text(json.dumps(deploy_file))  # JSON is YAML
    options = ServerOptions(
        model=voxtral_checkpoint,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
        arguments=("--omni", "--deploy-config", str(path)),
    )
    with Server(options) as server:
        yield server


@pytest.fixture
def client(server):
    client = SpeechClient(server.url)
    yield client
    client.close()
    assert server.is_healthy()


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def test_presets_speak(client):
    for name in PRESETS:
        spoken = client.speak(voice=name, max_new_tokens=NUM_FRAMES)
        assert (spoken.status, spoken.cache) == (200, "none"), spoken.audio[:500]
        assert len(spoken.audio) % (SAMPLES_PER_FRAME * BYTES_PER_SAMPLE) == 0
        assert set(spoken.audio) != {0}


def test_clones_are_refused_and_the_next_preset_speaks(
    client, server, voxtral_checkpoint, make_clip
):
    reason = FAMILY.clones(voxtral_checkpoint)
    clip = make_clip()
    assert message(client.register("Ann", clip)) == reason
    for fields in (
        {"ref_audio": data_url(clip)},
        {"ref_audio": data_url(clip), "voice": "fr_male"},
        {"voice": "Ann"},
    ):
        refused = client.speak(**fields)
        assert refused.status == 400
        assert json.loads(refused.audio)["error"]["message"] == reason
    assert client.stats()["registry"] == {"speakers": 0}
    assert client.http.get("/v1/audio/voices/Ann").status_code == 404
    assert client.speak(voice="fr_male", max_new_tokens=NUM_FRAMES).status == 200
    log = server.options.log_path.read_text(errors="replace")
    assert "Traceback" not in log
