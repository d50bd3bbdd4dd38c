#!/usr/bin/env bash
# Installs Debian's nginx, which the tests put in front of two servers.
# Does nothing where one is there. usage: scripts/setup_nginx.sh
set -euo pipefail

if command -v nginx >/dev/null || [ -x /usr/sbin/nginx ]; then
  exit 0
fi
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
# The program alone: the package would start a server where services may be started.
policy=/usr/sbin/policy-rc.d
made=0
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod +x "$policy"
  made=1
fi
"${as_root[@]}" apt-get install -y -qq --no-install-recommends nginx
[ "$made" = 0 ] || "${as_root[@]}" rm "$policy"
