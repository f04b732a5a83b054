#!/usr/bin/env bash
# Everything that needs a GPU, in one call of at most nine minutes: the tests marked gpu, then the benchmarks.
#
#   benchmarks/gpu_check.sh OUT
#
# OUT gets a JSON file and a log of each part, and parts.tsv: part, exit code, seconds. Each part has a time limit of its
# own; a part that fails or runs out of time does not stop the later ones, and what it had measured until then is in
# its file. The exit code is 0 if every part was 0.
#
# From the environment: PYTHON (the interpreter, default python3), PARTS (default: all), SHAPE (default llada-8b),
# BUDGET (seconds in all, default 530), and COMMITS (tokens a step where the pace is forced, default 2.8).
set -u
out=${1:?folder for the results}
python=${PYTHON:-python3}
shape=${SHAPE:-llada-8b}
commits=${COMMITS:-2.8}
deadline=$((SECONDS + ${BUDGET:-530}))
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 1
: >"$out/parts.tsv"
status=0

# part NAME LIMIT COMMAND...: run it with its limit, or what is left of the budget if that is less.
part() {
  local name=$1 limit=$2 left=$((deadline - SECONDS)) began=$SECONDS code
  shift 2
  [[ " ${PARTS:-tests nodes kernels step workload short dream} " == *" $name "* ]] || return 0
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 1 ]; then
    code=124
    echo "$name: no time left" | tee "$out/$name.log"
  else
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
  fi
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" >>"$out/parts.tsv"
  [ "$code" -eq 0 ] || status=1
}

bench() { echo "$python" -m flash_dllm bench "$@"; }
steps="--steps 20 --commit-per-step $commits"

# Files by name: others need packages that a machine for measuring may lack. Each has a process of its own, since most
# of the time goes into compiling.
files="tests/test_runner.py tests/test_recorded_caches.py tests/test_warm_up.py tests/kernels/test_attend_rows.py
  tests/kernels/test_head_confidence.py tests/kernels/test_gated_linear.py tests/kernels/test_linear_triton.py
  tests/kernels/test_norms.py tests/kernels/test_qkv_rope_write.py
  tests/goldens/test_traces.py tests/quant/test_gpu.py tests/bench/test_gpu.py tests/parallel/test_gpu.py"
export python files
part tests 170 bash -c 'xargs -n 1 -P 13 "$python" -m pytest -m gpu -p no:cacheprovider -q <<<$files'
# Two processes that wait for each other take turns on the GPU; beside others each turn would be later.
part nodes 150 "$python" -m pytest -m gpu -p no:cacheprovider -q tests/parallel/test_nodes_on_gpu.py
# shellcheck disable=SC2046,SC2086
{
  part kernels 70 $(bench kernels --shape "$shape" --json "$out/kernels-h200.json")
  part step 150 $(bench step --shape "$shape" --batch 1,8,16,32 --prompt 1000 $steps --json "$out/step-h200.json")
  part workload 100 $(bench workload --shape "$shape" --json "$out/workload-h200.json")
  part short 40 $(bench step --shape "$shape" --batch 1,32 --prompt 200 $steps --json "$out/step-short-h200.json")
  part dream 40 $(bench step --shape dream-7b --batch 1,8 --prompt 1000 $steps --json "$out/step-dream-h200.json")
}
echo "== parts: name, exit code, seconds"
cat "$out/parts.tsv"
exit "$status"
