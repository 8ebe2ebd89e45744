#!/usr/bin/env bash
# Before the first release, the owner decides the addresses of repository and site. They
# are in pyproject.toml, and a test compares the other files with it. With the real OWNER
# and NAME in it, this line replaces both addresses everywhere:
#
#   git grep -lE 'optax-lossscale(/|\.github\.io/)optax_lossscale' | xargs perl -pi -e \
#     's#optax-lossscale(/|\.github\.io/)optax_lossscale#OWNER${1}NAME#g'
#
# The owner also decides the authors' names (pyproject.toml, CITATION.cff, docs/conf.py)
# and the date of the release. Check the workflows with tests/tools/actionlint.sh. On
# GitHub, let Pages publish from GitHub Actions.
#
# Builds the wheel and the sdist. Each installs in a bare environment, with nothing but
# JAX and Optax, and passes its doctests there; those of `plotting` with the extra `plot`,
# and those of `compat.flax` and `compat.numpyro` with Flax and NumPyro.
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
    --ignore-glob='*/demo.py' --ignore-glob='*/compat/flax.py' --ignore-glob='*/compat/numpyro.py'
  bare/bin/pip install -q "$built[plot]"
  doctests --pyargs optax_lossscale.plotting
  bare/bin/pip install -q flax numpyro
  doctests --pyargs optax_lossscale.compat.flax optax_lossscale.compat.numpyro
done
