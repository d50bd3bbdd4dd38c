#!/usr/bin/env bash
# Installs Debian's ffmpeg, with which the tests make clips and hear them.
# Does nothing where one is there. usage: scripts/setup_ffmpeg.sh
set -euo pipefail

if command -v ffmpeg >/dev/null; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" ffmpeg
