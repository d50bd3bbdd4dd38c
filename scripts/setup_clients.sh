#!/usr/bin/env bash
# Builds .venv-clients: the packages of clients, by whose own code `make test-all` speaks.
# They want other versions of libraries than the host. usage: scripts/setup_clients.sh
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
wanted=tests/features/clients.txt
if cmp --silent "$wanted" .venv-clients/installed.txt; then
  exit 0
fi
rm -rf .venv-clients
"$venv/bin/python" -m venv .venv-clients
if ! "$venv/bin/python" -m uv pip install --quiet --python .venv-clients/bin/python -r "$wanted"; then
  .venv-clients/bin/python -m pip install --quiet -r "$wanted"
fi
cp "$wanted" .venv-clients/installed.txt
