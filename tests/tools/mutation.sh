#!/usr/bin/env bash
# Mutation testing of the core with mutmut, which changes the code in one place after the
# other and runs the tests concerned. Prints the share of changes that a test noticed, and
# each unnoticed change that equivalent_mutants.md does not list. Fails if there is such a
# change, or if the share is below 90 %. Takes some hours on two cores.
#
#   tests/tools/mutation.sh [folder]     where `mutmut show NAME` then shows a change
#
# With the folder of a run that was stopped, it goes on with what that run has not tried.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=${1:-$(mktemp -d)}
if [ -f "$folder/preload.txt" ]; then
  source "$folder/.venv/bin/activate"
  cd "$folder"
else
  mkdir -p "$folder"
  git archive HEAD | tar -x -C "$folder"
  python3.11 -m venv "$folder/.venv"
  source "$folder/.venv/bin/activate"
  pip install -q '.[test]' mutmut==3.8.1
  cd "$folder"
  # mutmut leaves decorated functions alone. Without these decorators results are the same.
  core=$(python -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["only_mutate"])')
  sed -i -E '/^@(jax\.jit|partial\(jax\.jit)/d' $core
  # Every test run imports these. Nothing may start JAX here, since it must not be forked.
  printf '%s\n' jax optax flax.nnx flax.training.train_state hypothesis chex equinox \
    jaxtyping orbax.checkpoint > preload.txt
fi

# Most programs are the same after a change, so they are compiled only once.
export JAX_COMPILATION_CACHE_DIR=$folder/.jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

mutmut run --max-children "$(nproc)"
python <<'EOF'
import pathlib
import subprocess

def mutmut(*args):
    return subprocess.check_output(["mutmut", *args], text=True).splitlines()

verdicts = [line.strip().split(": ") for line in mutmut("results", "--all", "true")]
# "Interrupted" are tests that cannot even be collected.
noticed = ("killed", "timeout", "check was interrupted by user")
missed = [name for name, verdict in verdicts if verdict not in noticed]
named = pathlib.Path("tests/tools/equivalent_mutants.md").read_text()
unnamed = 0
for name in missed:
    diff = [line for line in mutmut("show", name) if line.startswith(("+ ", "- "))]
    new = [line for line in diff if line[0] == "+" and line.strip("+ )")]
    line = (new or diff)[0][1:].strip()  # Of one that is left out, the old line.
    if f"`{line}`" not in named:
        print(name, *diff, sep="\n    ")
        unnamed += 1
share = 1 - len(missed) / len(verdicts)
print(
    f"{len(verdicts)} changes, {share:.1%} noticed; {unnamed} unnoticed changes are not "
    "listed in equivalent_mutants.md"
)
raise SystemExit(share < 0.9 or unnamed > 0)
EOF
