#!/usr/bin/env bash
# Tests and measures this package on an NVIDIA GPU with at least 16 GB of memory.
#
#   benchmarks/on_gpu.sh [--tiny] [FOLDER]
#
# Each part has a limit, and one run takes at most 25 minutes. Run the script again to
# finish the parts that met their limits: whatever is in FOLDER (`on_gpu_results`) is not
# done again. At the end FOLDER has results.json, results.md and a log of each part.
# With --tiny a CPU takes the script through its parts in some minutes: a few tests, and
# models so small that their figures say nothing.
set -uo pipefail
trap 'exit 130' INT TERM

tiny=()
if [ "${1-}" = --tiny ]; then
  tiny=(--tiny)
  shift
fi
mkdir -p "${1:-on_gpu_results}"
folder=$(cd "${1:-on_gpu_results}" && pwd)
cd "$(dirname "$0")/.."

# part LIMIT NAME COMMAND...: runs a command for at most so many seconds, and 5 more in
# which it may stop. The name of its log says whether it has finished.
part() {
  local log="$folder/$2.log" unfinished="$folder/$2.unfinished.log"
  [ -e "$log" ] && { echo "$2: done before"; return; }
  echo "$2: at most $1 s"
  timeout --foreground --signal=INT --kill-after=5 "$1" "${@:3}" > "$unfinished" 2>&1
  local status=$?
  # Failed tests are a result: pytest returns 1 when it has run all tests.
  [ $status = 0 ] || [[ $2 = tests* && $status = 1 ]] && mv "$unfinished" "$log"
}

measure() {
  part "$1" "$2${3:+ of $3}" \
    python benchmarks/on_gpu.py "${@:2}" --json "$folder/results.json" "${tiny[@]}"
}

# Several processes share the GPU, so none reserves its memory. Their lines are long enough
# for the error of each test.
run_tests() {
  part "$1" "tests, $2" env XLA_PYTHON_CLIENT_PREALLOCATE=false COLUMNS=250 \
    python -m pytest -v -rfE --tb=short "${@:3}"
}

python -c "import pytest, xdist" || exit  # Without them tests would return 1, as if they failed.
python benchmarks/on_gpu.py start --json "$folder/results.json" "${tiny[@]}" || exit

if [ ${#tiny[@]} = 1 ]; then
  export JAX_NUM_CPU_DEVICES=1
  run_tests 90 gpu -m gpu tests/integration/test_gpu.py
  run_tests 90 scaling tests/scaling/test_early_masks.py
else
  run_tests 80 gpu -m gpu
  run_tests 120 scaling -n 4 tests/scaling optax_lossscale
  run_tests 50 autocast -n 4 tests/autocast
  run_tests 50 operations -n 4 tests/operations
  run_tests 60 "other systems" -n 4 tests/other_systems
  run_tests 50 integration -n 4 tests/integration
  run_tests 30 docs -n 4 tests/docs
fi
measure 165 steps "GPT"
measure 100 steps "ResNet-18"
measure 90 steps "LSTM"
measure 255 steps "GPT, 125 M"
measure 155 steps "ResNet-50"
measure 110 "largest batch" "GPT, 125 M"
measure 90 "largest batch" "ResNet-50"
measure 50 update

python benchmarks/on_gpu.py report --json "$folder/results.json" | tee "$folder/results.md"
if compgen -G "$folder/*.unfinished.log"; then
  echo "These parts have not finished. Run the script again to continue them." >&2
  exit 1
fi
