#!/usr/bin/env bash
# Installs Debian's PostgreSQL, of which the tests start servers of their own.
# Does nothing where one is there. usage: scripts/setup_postgres.sh
set -euo pipefail

if compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null; then
  exit 0
fi
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
# The tests need the programs, and no server that starts with the machine.
"$(dirname "$0")/apt_install.sh" pg_createcluster postgresql-common
"${as_root[@]}" sed -i 's/^#*create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
"$(dirname "$0")/apt_install.sh" initdb postgresql
