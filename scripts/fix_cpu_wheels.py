"""Make wheels usable that an index had and that cannot load here.

vLLM-Omni depends on torchaudio, torchvision and torchcodec. Some package
indexes carry only their CUDA builds, and the native parts of those cannot load
beside a CPU torch. And of one version in several indexes uv takes the first index's
wheel, be it the one without the native library, where pip takes this platform's. Each
fix below is tried only if the plain import fails, so on a machine that reaches matching
wheels this script changes nothing.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path


def imports(statement: str) -> bool:
    """Tell whether ``statement`` runs in a fresh interpreter."""
    command = [sys.executable, "-c", statement]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode == 0


def package(name: str) -> Path | None:
    """Return the folder of an installed package, or None."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def fix_torchaudio() -> str:
    """Without its extension torchaudio runs its pure Python parts: all we use."""
    folder = package("torchaudio")
    if folder is None or imports("import torchaudio"):
        return "as it is"
    for library in (folder / "lib").glob("_torchaudio*.so"):
        library.unlink()
    return "native extension removed"


def fix_torchvision() -> str:
    """Register shapes only for operators that exist; vLLM needs just the import."""
    folder = package("torchvision")
    if folder is None or imports("import torchvision"):
        return "as it is"
    source = folder / "_meta_registrations.py"
    text = source.read_text()
    for operator in ("nms", "qnms"):
        decorator = f'@torch.library.register_fake("torchvision::{operator}")\n'
        text = text.replace(decorator, "")
    source.unlink()  # it may be a link into the cache of what installed it
    source.write_text(text)
    return "shape registrations of missing operators removed"


def fix_soundfile() -> str:
    """Install it with pip, whose choice brings libsndfile along."""
    if imports("import soundfile"):
        return "as it is"
    wanted = f"soundfile=={importlib.metadata.version('soundfile')}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*command, "--force-reinstall", wanted], check=True)
    return "reinstalled with this platform's library"


def remove_unloadable(distribution: str, module: str) -> str:
    """Uninstall an optional package; vLLM treats its absence as normal."""
    if package(module) is None or imports(f"import {module}"):
        return "as it is"
    command = [sys.executable, "-m", "pip", "uninstall", "-q", "-y", distribution]
    subprocess.run(command, check=True)
    return "uninstalled (cannot load here, and is optional)"


def main() -> int:
    """Fix what needs fixing; fail if vLLM's imports still do not work."""
    print("soundfile:", fix_soundfile())
    print("torchaudio:", fix_torchaudio())
    print("torchvision:", fix_torchvision())
    print("torchcodec:", remove_unloadable("torchcodec", "torchcodec"))
    print("fa3-fwd:", remove_unloadable("fa3-fwd", "fa3_fwd"))
    if imports("import soundfile, torchaudio, torchvision"):
        return 0
    print("soundfile, torchaudio or torchvision still cannot be imported; see above.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
