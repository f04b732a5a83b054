#!/usr/bin/env bash
# compute-sanitizer's memcheck over tests of every kernel at real sizes; each tensor is an allocation of its own, so that
# a read beside one is an error.
#
#   benchmarks/sanitize.sh OUT
#
# OUT gets a log of each part and parts.tsv: part, exit code, seconds, tests, errors. The exit code is 0 if every part
# ended well and none has an error. Minutes: a checked kernel runs tens of times slower.
set -u
out=${1:?folder for the logs}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTORCH_NO_CUDA_MEMORY_CACHING=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 1
: >"$out/parts.tsv"

# check NAME TESTS SELECTION
check() {
  local began=$SECONDS code
  timeout -k 5 "${LIMIT:-280}" compute-sanitizer --tool memcheck --error-exitcode 99 \
    "$python" -m pytest -m gpu -p no:cacheprovider -o addopts= -o timeout=0 -v "tests/kernels/$2" -k "$3" >"$out/$1.log" 2>&1
  code=$?
  printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$code" "$((SECONDS - began))" "$(grep -c PASSED "$out/$1.log")" \
    "$(grep -o 'ERROR SUMMARY: [0-9]*' "$out/$1.log" | grep -o '[0-9]*$')" >>"$out/parts.tsv"
}

check attention test_attend_rows.py "17-129 or 128-127" &
check projection test_qkv_rope_write.py "real_models and 1000 and not shape2" &
check gated test_gated_linear.py "real_models and 513" &
check head test_head_confidence.py "real_sizes and 126464 and (16-argmax-prob or 17-argmax or 16-gumbel-margin or filters)" &
check rest test_norms.py "17" &
check products test_linear_triton.py "shape0 and 1-" &
wait
cat "$out/parts.tsv"
[ "$(awk '$2 != 0 || $4 == 0 || $5 != 0' "$out/parts.tsv" | wc -l)" -eq 0 ]
