"""Runs a server's talker on the host's second model runner, on a CPU.

Since 0.32 vLLM has that runner for CPUs too. Its kernels are Triton's, whose releases
compile for no CPU, but interpret: slowly, which does for a tiny talker. This plugin of
a server has it built, and `prepare` makes each of its processes interpret.
"""

from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

from benchmarks import server_plugins

_TALKER_SAMPLER = "vllm_omni.model_executor.models.qwen3_tts.talker_sampler"
_SITE = f"from {__name__} import interpret\ninterpret()\n"


def prepare(folder: Path) -> dict[str, str]:
    """Write what makes a server do it into a folder; returns the server's variables."""
    server_plugins.announce(folder, [__name__])
    (folder / "sitecustomize.py").write_text(_SITE)  # before vLLM looks for Triton
    return {"PYTHONPATH": f"{Path.cwd()}:{folder}", "TRITON_INTERPRET": "1"}


def interpret() -> None:
    """Add what vLLM takes for Triton's compiler for CPUs."""
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver)  # pyright: ignore


def register() -> None:
    """Have a stage's worker build the runner that the deploy file names."""
    if server_plugins.is_api_process():
        return
    import vllm.v1.sample.ops.topk_topp_sampler as sampling
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm_omni.worker_v2.omni_ar_model_runner import OmniARModelRunner

    from vllm_tts_cache.platforms.cpu_kernels import separate_rows
    from vllm_tts_cache.platforms.cpu_worker import CPUARWorker

    class SecondRunner(OmniARModelRunner):
        warming_up_model = CPUModelRunner.warming_up_model

        def load_model(self, *args, **options):
            super().load_model(*args, **options)
            separate_rows(self.model)

    def init_device(self):
        is_second = self.model_config.use_v2_model_runner
        if is_second:
            self.model_runner_cls = SecondRunner
            self.compilation_config.max_cudagraph_capture_size = 0
        build(self)
        self.use_v2_model_runner = is_second

    build, CPUARWorker.init_device = CPUARWorker.init_device, init_device
    # Its kernel cannot be interpreted.
    sampling.HAS_TRITON = False  # pyright: ignore[reportPrivateImportUsage]
    # As on a GPU the host's own sampler masks what the talker does not speak, but its
    # kernel would take seconds for an id: vLLM's sampler draws behind the mask.
    host = resolve_name(f"{_TALKER_SAMPLER}:Qwen3TTSTalkerSampler")
    host._supported = lambda *_: True
    host.add_request = lambda self, *given: self.base_sampler.add_request(*given)
