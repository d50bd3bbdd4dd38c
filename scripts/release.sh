#!/usr/bin/env bash
# Builds the wheel and the sdist of a release, and tags it; uploads nothing.
# It refuses a dirty tree, a CHANGELOG without the version, figures of another revision or
# of a dirty tree, a failing suite, a wheel of which no server speaks, and a tree that
# changed meanwhile.
# usage: scripts/release.sh [--check]   (--check: refuse only what is refused at once)
set -euo pipefail
cd "$(dirname "$0")/.."

refuse() { printf 'No release: %s\n' "$*" >&2; exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' vllm_tts_cache/__init__.py)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] ||
  refuse "vllm_tts_cache/__init__.py has the version '$version'; write one such as 0.1.0."
[ -z "$(git status --porcelain)" ] ||
  refuse "the tree has changes; commit them, or put them away."
grep -Eq "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  refuse "CHANGELOG.md has no line '## [$version] - YYYY-MM-DD'; write what changed."
package=$(git log -1 --abbrev=7 --format=%h -- vllm_tts_cache ':!vllm_tts_cache/__init__.py')
[ "$(grep -oE 'revision [0-9a-f]{7}' docs/performance.md | sort -u)" = "revision $package" ] ||
  refuse "docs/performance.md has figures of another revision than $package; run
python -m benchmarks, name its result in benchmarks/figures.py and run python -m benchmarks.figures."
! grep -qF '(dirty)' docs/performance.md ||
  refuse "docs/performance.md has figures of a tree with changes; measure a commit."
! git rev-parse -q --verify "refs/tags/v$version" > /dev/null ||
  refuse "v$version is tagged already; write the next version."
[ "${1:-}" != --check ] || exit 0

tested=$(git rev-parse HEAD)
.ci/run || refuse "the suite fails; see above."
.venv/bin/python -m pytest -q -m long tests/e2e/test_wheel.py ||
  refuse "no server speaks from the wheel; see above."
rm -rf dist
.venv/bin/python -m build
[ "$(git rev-parse HEAD)" = "$tested" ] && [ -z "$(git status --porcelain)" ] ||
  refuse "the tree changed while it was tested and built; run this again."
git tag -a "v$version" -m "Release $version"
echo "dist/ is built from v$version. Next: git push origin v$version, and upload dist/."
