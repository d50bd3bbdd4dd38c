#!/usr/bin/env bash
# Installs Debian's Chromium and its driver, which the tests of the page are run in.
# Does nothing where both are there. usage: scripts/setup_browser.sh
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" chromium chromium-driver fonts-dejavu-core
