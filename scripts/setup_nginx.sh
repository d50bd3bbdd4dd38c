#!/usr/bin/env bash
# Installs Debian's nginx, which the tests put in front of two servers.
# Does nothing where one is there. usage: scripts/setup_nginx.sh
set -euo pipefail

if command -v nginx >/dev/null || [ -x /usr/sbin/nginx ]; then
  exit 0
fi
"$(dirname "$0")/apt_install.sh" nginx
