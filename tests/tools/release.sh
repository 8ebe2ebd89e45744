#!/usr/bin/env bash
# Builds the wheel and the sdist. Each installs in a bare environment, with nothing but
# JAX and Optax, and passes its doctests there; those of `plotting` with the extra `plot`,
# and those of `compat.flax` with Flax. Then each passes README's two commands on the
# oldest and the newest Python, which takes half an hour, or on those that are given:
# tests/tools/release.sh python3.13
set -euo pipefail
cd "$(dirname "$0")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3.11 -m venv "$scratch/build"
"$scratch/build/bin/pip" install -q build twine
"$scratch/build/bin/python" -m build -o "$scratch/dist" . > "$scratch/log"
"$scratch/build/bin/twine" check --strict "$scratch"/dist/*

doctests() {
  bare/bin/python -m pytest -q -p no:cacheprovider -W error --doctest-modules \
    -o doctest_optionflags='ELLIPSIS NORMALIZE_WHITESPACE' "$@"
}
cd "$scratch" # So that nothing is imported from the checkout.
for built in dist/*; do
  python3.11 -m venv --clear bare
  bare/bin/pip install -q "$built" pytest
  doctests --pyargs optax_lossscale --ignore-glob='*/plotting' \
    --ignore-glob='*/demo.py' --ignore-glob='*/compat/flax.py'
  bare/bin/pip install -q "$built[plot]"
  doctests --pyargs optax_lossscale.plotting
  bare/bin/pip install -q flax
  doctests --pyargs optax_lossscale.compat.flax
done

tar xf dist/*.tar.gz
cd optax_lossscale-*/
for python in ${*:-python3.11 python3.13}; do
  for built in ../dist/*; do
    "$python" -m venv --clear ../fresh
    source ../fresh/bin/activate
    # README's commands, with the wheel or the sdist in place of the clone.
    grep "^pip install '\.\[" README.md | sed "s#'\.\[#'$built[#" > ../commands
    cat ../commands
    bash -e ../commands
    # The tests have imported the sources beside them, so what is installed must be these.
    diff -r -x __pycache__ optax_lossscale ../fresh/lib/"$python"/site-packages/optax_lossscale
    deactivate
  done
done
