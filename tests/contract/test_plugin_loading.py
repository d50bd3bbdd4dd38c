"""Loading the plugin costs little and changes nothing where it has no business.

Each case is a process of its own: what is imported is the thing that is tested.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store_samples import opened, register
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.speaker.family import families

HEAVY = ("torch", "vllm", "vllm_omni", "numpy", "fastapi", "safetensors", "soundfile")
REPOSITORY = Path(__file__).parents[2]

# What an installed plugin would change in stock's objects.
FINGERPRINT = """
import json, logging
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.diffusion.registry import DiffusionModelRegistry
from vllm_omni.engine import arg_utils
from vllm_omni.entrypoints.openai import api_server, tts_adapters
from vllm_omni.model_executor.models.registry import OmniModelRegistry
from vllm_omni.worker.mixins import OmniWorkerMixin
from vllm_tts_cache.speaker.family import families

def fingerprint():
    return {
        "models": [OmniModelRegistry.models[name].module_name
            for family in families() for name in (*family.models, *family.decoders)],
        "pipelines": [DiffusionModelRegistry.models[name].module_name
            for family in families() for name in family.pipelines],
        "vllms_models": arg_utils.register_omni_models_to_vllm.__module__,
        "mixin": sorted(n for n in vars(OmniWorkerMixin) if "tts_cache" in n),
        "scheduler": "_update_request_with_output" in vars(OmniARScheduler),
        "serving": api_server.OmniOpenAIServingSpeech.__module__,
        "stream": api_server.OmniStreamingSpeechHandler.__module__,
        "adapters": [a.__module__ for a in tts_adapters.TTS_ADAPTER_REGISTRY.values()],
        "routes": sorted(
            r.endpoint.__module__ for r in api_server.router.routes
            if r.path.startswith("/v1/audio/voices")),
        "pages": [r.path for r in api_server.router.routes
            if r.path.startswith("/voices")],
    }
"""


def run(code, *, path=None, **environ):
    """Run in a new interpreter; returns what it wrote to stdout and to stderr."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("SPEAKER_")}
    if path is not None:
        ours["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**ours, **environ},
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def told(code, **kwargs):
    """The last line that the code printed, as JSON."""
    return json.loads(run(code, **kwargs)[0].strip().splitlines()[-1])


def installed(directory, version, name="vllm-omni"):
    """A directory whose metadata says that this is installed, by default vllm-omni."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    return directory


IMPORTED = f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"


def test_in_a_plain_vllm_process_the_plugin_does_nothing_and_is_quick():
    code = f"""
import json, sys, time
import importlib.metadata, logging  # vLLM has them: it found the entry point
before = time.process_time()
import vllm_tts_cache.plugin as plugin
plugin.register_engine_core()
plugin.register_engine_core()
seconds = time.process_time() - before
loaded = sorted(m for m in sys.modules if m.startswith("vllm_tts_cache."))
heavy = [m for m in {HEAVY!r} if m in sys.modules]
print(json.dumps([seconds, loaded, heavy]))
"""
    # The machine may be busy; what the plugin costs is the least of several tries.
    runs = [told(code) for _ in range(3)]
    assert min(seconds for seconds, _, _ in runs) < 0.05
    assert runs[0][1:] == [["vllm_tts_cache.plugin"], []]


def refused(directory, version="1.0", **environ):
    """What register() says in a process on an unsupported host, and what it logs."""
    code = """
import json, logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["vllm_omni.entrypoints.openai.api_server"] = sys
import vllm_tts_cache.plugin as plugin
from vllm_tts_cache.errors import ConfigError
try:
    plugin.register()
    print("null")
except ConfigError as exc:
    print(json.dumps(str(exc)))
"""
    stdout, stderr = run(code, path=installed(directory, version), **environ)
    return json.loads(stdout.splitlines()[-1]), stderr


@pytest.mark.parametrize("version", ["0.29.2", "0.31.0", "0.300.0", "1.0"])
def test_an_unsupported_host_is_one_clear_line_and_nothing_else(tmp_path, version):
    code = f"""
import json, logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["vllm_omni.engine.stage_engine_core_proc"] = sys
import vllm_tts_cache.plugin as plugin
for _ in range(2):
    plugin.register()
    plugin.register_engine_core()
    assert plugin.cpu_platform() is None
{IMPORTED}
"""
    stdout, stderr = run(
        code, path=installed(tmp_path, version), SPEAKER_SAMPLES_DIR=str(tmp_path)
    )
    assert json.loads(stdout) == []
    assert stderr == (
        "WARNING vllm-tts-cache supports vllm-omni 0.30 and 0.32, and found "
        f"{version}: it stays switched off. Install a version of vllm-tts-cache that "
        "is for this host.\n"
    )


def test_a_host_that_would_ask_tenants_for_no_key_does_not_start(tmp_path):
    reason, log = refused(tmp_path, SPEAKER_TENANTS_FILE=str(tmp_path / "tenants"))
    assert "found 1.0: without it no registered voice would be found, and " in reason
    assert log.splitlines()[-1] == f"ERROR {reason}"


def test_a_host_that_would_not_find_the_voices_does_not_start(tmp_path):
    at = {"SPEAKER_SAMPLES_DIR": str(tmp_path)}
    store = opened(tmp_path)
    assert refused(tmp_path / "none", **at)[0] is None
    register(store, "Ann")
    reason, _ = refused(tmp_path / "one", **at)
    store.close()
    assert reason == refused(tmp_path / "closed", **at)[0]
    off = {"SPEAKER_CACHE_ENABLED": "0"}
    assert "or set SPEAKER_CACHE_ENABLED=0" in reason
    assert refused(tmp_path / "off", **at, **off)[0] is None
    (tmp_path / FILE_NAME).write_bytes(b"no database")
    assert refused(tmp_path / "broken", **at)[0] == reason
    url = "postgresql://user@localhost/voices"
    assert refused(tmp_path / "server", SPEAKER_CATALOGUE_URL=url)[0] == reason


@pytest.mark.parametrize("version", ["0.30", "0.30.7", "0.30.1rc1", "0.32.0rc1"])
def test_every_patch_release_of_the_host_is_supported(tmp_path, version):
    code = """
import vllm_tts_cache.plugin as plugin
print(str(plugin._host_is_supported()).lower())
"""
    assert told(code, path=installed(tmp_path, version)) is True


def test_without_vllm_omni_the_plugin_says_nothing():
    code = f"""
import json, sys
from importlib import metadata
import vllm_tts_cache.plugin as plugin
def absent(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = absent
plugin.register()
assert plugin.cpu_platform() is None
{IMPORTED}
"""
    stdout, stderr = run(code)
    assert json.loads(stdout) == []
    assert stderr == ""


@pytest.fixture(scope="module")
def fingerprints():
    """Of one process, because the host takes long to import: in this order."""
    code = f"""{FINGERPRINT}
import os
import vllm_tts_cache.plugin as plugin
found = {{"stock": fingerprint()}}
os.environ["SPEAKER_CACHE_ENABLED"] = "0"
plugin.register()
plugin.register_engine_core()
found["switched off"] = fingerprint()
del os.environ["SPEAKER_CACHE_ENABLED"]
os.environ["SPEAKER_WEB"] = "0"
plugin.register()
found["once"] = fingerprint()
plugin.register()
plugin.register_engine_core()
found["twice"] = fingerprint()
print(json.dumps(found))
"""
    return told(code)


def test_switched_off_everything_is_stocks(fingerprints):
    stock = fingerprints["stock"]
    assert fingerprints["switched off"] == stock
    assert (stock["mixin"], stock["scheduler"]) == ([], False)
    modules = [*stock["models"], *stock["pipelines"], *stock["routes"]]
    modules += [stock["vllms_models"], stock["serving"], stock["stream"]]
    modules += stock["adapters"]
    assert all(module.startswith("vllm_omni.") for module in modules), modules


def test_registering_puts_our_parts_in_place(fingerprints):
    once = fingerprints["once"]
    assert fingerprints["twice"] == once
    adapters = [m for m in once["adapters"] if not m.startswith("vllm_omni.")]
    assert len(adapters) == sum(not family.pipelines for family in families())
    assert once["routes"] and len(once["mixin"]) == 8 and once["scheduler"]
    ours = [*once["models"], *once["pipelines"], *once["routes"], *adapters]
    ours += [once["vllms_models"], once["serving"], once["stream"]]
    assert all(module.startswith("vllm_tts_cache.") for module in ours), ours
    assert once["pages"] == []  # it is switched off; see test_voices_page.py


def test_the_cpu_platform_can_be_switched_off():
    assert told(PLATFORM, SPEAKER_CACHE_CPU_PLATFORM="0") is None


PLATFORM = """
import json, os, sys
import torch
torch.accelerator.is_available = lambda: False
import vllm_tts_cache.plugin as plugin
print(json.dumps(plugin.cpu_platform()))
"""


def test_a_vllm_for_gpus_that_finds_none_has_not_our_cpu_platform(tmp_path):
    """It says so itself, and has no kernels for the CPU; any server here has ours."""
    path = installed(tmp_path, "0.30.0+cu130", name="vllm")
    assert told(PLATFORM, path=path, CUDA_VISIBLE_DEVICES="") is None


def test_a_wrong_setting_of_ours_does_not_stop_a_plain_vllm():
    code = "import vllm_tts_cache.plugin as plugin\nplugin.register_engine_core()"
    run(code, SPEAKER_CACHE_MAX_BYTE="1")
