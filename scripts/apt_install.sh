#!/usr/bin/env bash
# Installs Debian packages for their programs alone: their services are started neither
# now nor with the machine. Does nothing where the programs are there.
# usage: scripts/apt_install.sh "PROGRAM..." PACKAGE...
set -euo pipefail

PATH=$PATH:/usr/sbin
if type -P $1 >/dev/null; then
  exit 0
fi
shift

exec 9<"$0"
flock 9  # one at a time: they share apt's lock and the policy below

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod +x "$policy"
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@"
for package in "$@"; do
  [ ! -e "/etc/init.d/$package" ] || "${as_root[@]}" update-rc.d "$package" disable
done
