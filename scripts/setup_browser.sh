#!/usr/bin/env bash
# Installs Debian's Chromium and its driver, which the tests of the page are run in.
# Does nothing where both are there. usage: scripts/setup_browser.sh
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core
