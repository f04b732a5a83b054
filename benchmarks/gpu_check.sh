#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked gpu, then the step benchmark at the 8B shape.
#
#   benchmarks/gpu_check.sh OUT
#
# OUT gets gpu-tests.log and step.jsonl. PYTHON names the interpreter (default python3).
set -u
out=${1:?folder for the results}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"
cd "$root" || exit 1
"$python" -m pytest tests -m gpu -p no:cacheprovider 2>&1 | tee "$out/gpu-tests.log"
status=${PIPESTATUS[0]}
: >"$out/step.jsonl"
for batch in 1 8; do
  for method in none+threshold flash+threshold flash+verify flash+branch; do
    "$python" benchmarks/step.py --shape llada-8b --method "$method" --batch "$batch" | tee -a "$out/step.jsonl"
  done
done
exit "$status"
