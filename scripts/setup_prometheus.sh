#!/usr/bin/env bash
# Installs Debian's Prometheus, which the tests let scrape a server, and its promtool.
# Does nothing where both are there. usage: scripts/setup_prometheus.sh
set -euo pipefail

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" prometheus
