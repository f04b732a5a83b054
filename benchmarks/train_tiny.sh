#!/usr/bin/env bash
# Trains one stage of the three bundled models on one or two GPUs and packs the results.
#
#   benchmarks/train_tiny.sh STAGE BUDGET OUT [PREVIOUS]
#
# STAGE     A and B train a model; C continues a finished one, usually on changed data
# BUDGET    seconds for the whole stage (at most 540)
# OUT       folder for the parts: stage-STAGE.tar.00 ... (at most 15 MB each) and train-STAGE.log
# PREVIOUS  OUT of the stage before (its parts), or a folder with one folder a model: a state, or an exported model
#           (src/flash_dllm/weights continues the bundled ones)
#
# Two GPUs: tiny-llada has the first one, the other two models share the second. One GPU: tiny-llada trains alone, then
# the others for SIDE_SECONDS (default 120) of the budget. A failing side model does not stop the main one.
# PYTHON, MAIN, DREAM, GUIDE (recipe names, empty to leave out), WORKERS override the defaults; RESERVE is how many
# seconds of the budget are kept for saving and measuring; WORK is where the models are written before packing.
# Exit status 1 when a model failed.
set -u
stage=$1 budget=$2 out=$3 previous=${4:-}
python=${PYTHON:-python3}
main=${MAIN-tiny-llada} dream=${DREAM-tiny-dream} guide=${GUIDE-tiny-guide}
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
export TORCHINDUCTOR_COMPILE_THREADS=8
work=${WORK:-$(mktemp -d)}/$stage
mkdir -p "$out" "$work"
out=$(cd "$out" && pwd)
log=$out/train-$stage.log
: >"$log"

if [ -n "$previous" ] && compgen -G "$previous/stage-*.tar.00" >/dev/null; then
  mkdir -p "$work/previous"
  cat "$previous"/stage-*.tar.[0-9][0-9] | tar -x -C "$work/previous"
  previous=$work/previous
fi

train() { # gpu recipe budget workers; the guide has one stage and is trained beside the last one of the others
  local stage=$stage
  [ "$2" = "$guide" ] && stage=A
  local resume=()
  if [ -n "$previous" ] && { [ -f "$previous/$2/state.safetensors" ] || [ -f "$previous/$2/config.json" ]; }; then
    resume=(--resume "$previous/$2")
  fi
  CUDA_VISIBLE_DEVICES=$1 "$python" -m flash_dllm.train run --recipe "$2" --stage "$stage" --budget "$3" \
    --workers "$4" --out "$work/$2" --reserve "${RESERVE:-0}" "${resume[@]}" >>"$log" 2>&1 && return
  echo "$2 failed" >>"$log"
  touch "$work/failed"
}

gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
cores=$(nproc)
wide=${WORKERS:-$((cores > 24 ? 10 : cores > 8 ? 8 : 1))}
narrow=$((wide > 1 ? wide * 3 / 4 : 1))
sides=()
[ -n "$dream" ] && sides+=("$dream")
[ -n "$guide" ] && [ "$stage" = C ] && sides+=("$guide")

jobs=()
if [ "$gpus" -ge 2 ]; then
  for side in "${sides[@]}"; do train 1 "$side" "$budget" "$narrow" & jobs+=($!); done
  [ -n "$main" ] && train 0 "$main" "$budget" "$wide"
else
  share=$((${#sides[@]} ? ${SIDE_SECONDS:-120} : 0))
  [ -n "$main" ] && train 0 "$main" $((budget - share)) "$wide"
  for side in "${sides[@]}"; do train 0 "$side" "$share" "$narrow" & jobs+=($!); done
fi
for job in "${jobs[@]}"; do wait "$job"; done

# What a transfer can carry: states to resume (their exports can be made from them) and the exports of finished models.
cd "$work" || exit 1
list=()
for model in $main $dream $guide; do
  [ -d "$model" ] || continue
  files=("$model/eval.json" "$model/loss.jsonl")
  [ "$model" = "$guide" ] || files+=("$model/state.safetensors")
  [ "$stage" = C ] && files+=("$model/export")
  for file in "${files[@]}"; do [ -e "$file" ] && list+=("$file"); done
done
[ ${#list[@]} -gt 0 ] && tar -c "${list[@]}" | split -b 15000000 -d -a 2 - "$out/stage-$stage.tar."
ls -l "$out"
tail -n 40 "$log"
[ ! -e "$work/failed" ]
