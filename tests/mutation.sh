#!/usr/bin/env bash
# Mutation testing of the core with mutmut: it changes the code in one place after the
# other, and asks whether a test notices. Prints the changes that none did, and the share
# of those that one did; fails below 90 %. Takes more than an hour on two cores.
#
#   tests/mutation.sh [folder]     where `mutmut show NAME` then shows a change
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
git archive HEAD | tar -x -C "$folder"
python3.11 -m venv "$folder/.venv"
source "$folder/.venv/bin/activate"
pip install -q '.[test]' mutmut==3.8.1
cd "$folder"

# What is decorated mutmut leaves alone. These decorators change no result.
core=$(python -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["only_mutate"])')
sed -i -E '/^ *@(jax\.jit|partial\(jax\.jit|functools\.wraps)/d' $core
# What each test run would import; nothing that starts JAX, which must not be forked.
printf '%s\n' jax optax flax.nnx flax.training.train_state hypothesis chex equinox \
  jaxtyping orbax.checkpoint > preload.txt

mutmut run --max-children "$(nproc)"
mutmut results
mutmut export-cicd-stats
python -c '
import json
stats = json.load(open("mutants/mutmut-cicd-stats.json"))
noticed, total = stats["killed"] + stats["timeout"], stats["total"]
print(f"{noticed} of {total} noticed, {noticed / total:.1%}")
assert noticed >= 0.9 * total'
