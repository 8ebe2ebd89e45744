#!/usr/bin/env bash
# Runs the tests on every supported Python with the newest JAX and Optax, and on Python
# 3.11 with the oldest, each in a new environment. Prints a line for each, and fails if
# one of them fails.
#
#   tests/tools/versions.sh [oldest] [3.11] [3.12] [3.13]
#
# `oldest` takes the oldest versions that pyproject.toml allows, on Python 3.11. The others
# take the newest.
set -euo pipefail
cd "$(dirname "$0")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
oldest=$(grep -oE '(jax|optax|flax)>=[0-9.]+' pyproject.toml | sort -u | sed 's/>=/==/')

failed=0
for version in ${*:-oldest 3.11 3.12 3.13}; do
  pins=()
  python=python$version
  if [ "$version" = oldest ]; then
    pins=($oldest)
    python=python3.11
  fi
  "$python" -m venv "$scratch/$version"
  source "$scratch/$version/bin/activate"
  pip install -q '.[test]' "${pins[@]}"
  python -m pytest -q -n 2 -m "" > "$scratch/log" || { failed=1; cat "$scratch/log"; }
  python - "$(tail -n 1 "$scratch/log")" <<'PYTHON'
import importlib.metadata, platform, sys
versions = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "optax", "flax")]
print(f"python {platform.python_version()},", ", ".join(versions) + ":", sys.argv[1])
PYTHON
  deactivate
done
exit "$failed"
