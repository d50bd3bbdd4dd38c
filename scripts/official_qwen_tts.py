"""Install the official qwen-tts beside the environment, and print where.

It pins another transformers than the host, so it gets a folder of its own, to be put
first in ``PYTHONPATH``; torch, numpy, soxr and the rest come from the environment,
which stays as it is. Idempotent; the first time takes about half a minute.

usage: python scripts/official_qwen_tts.py
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

# Exactly what importing it needs on top of constraints.txt. Its own pins are the
# first two; transformers 4.57 needs the older tokenizers and huggingface-hub, which in
# turn cannot be read by newer kernels. The newest scikit-learn would bring one package
# more.
PINS = (
    "qwen-tts==0.1.1",
    "transformers==4.57.3",
    "tokenizers==0.22.2",
    "huggingface-hub==0.36.2",
    "kernels==0.9.0",
    "librosa==0.11.0",
    "audioread==3.1.0",
    "decorator==5.3.1",
    "pooch==1.9.0",
    "scikit-learn==1.7.2",
    "sox==1.5.0",
    "threadpoolctl==3.8.0",
)
TARGET = Path(sys.prefix) / "official-qwen-tts"
_STAMP = ".pins"


def main() -> None:
    """Install what is missing, then print the folder."""
    wanted = hashlib.sha256("\n".join((sys.version, *PINS)).encode()).hexdigest()
    stamp = TARGET / _STAMP
    if not stamp.is_file() or stamp.read_text() != wanted:
        _install(wanted)
    print(TARGET)


def _install(wanted: str) -> None:
    partial = TARGET.with_name(f"{TARGET.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    # Standard output is for the folder alone.
    subprocess.run(
        (*pip, "--no-deps", "--no-compile", "--target", str(partial), *PINS),
        check=True,
        stdout=sys.stderr,
    )
    (partial / _STAMP).write_text(wanted)
    shutil.rmtree(TARGET, ignore_errors=True)
    partial.rename(TARGET)


if __name__ == "__main__":
    main()
