#!/usr/bin/env bash
# Usage: scripts/gpu_check.sh [FOLDER]
#
# Proves in about ten minutes what matters on a machine with one GPU, or with two and more: the results of
# the CPU in double precision, every number format, resuming, coding, DDP and FSDP, and prints
# memory, speed and accuracy at the end. A line for each check begins with ok or FAILED.
#
#   FOLDER   where runs and check.log are written (default: ./gpu_check); it must be new
#
# From the environment, to try the script itself without a GPU:
#   GPU=cpu  compute on the CPU, on two processes
#   STEPS, ROWS, SIZE, BATCH
#            steps of a run (30), rows of the sample (4000), and size (base) and batch size (256) of
#            the model whose speed is measured
#
# The exit code is 0 if all checks are ok, else 1.

[ -n "${BASH_VERSION:-}" ] || exec bash -- "$0" "$@"  # started with another shell
set +o posix -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"
[[ $# -le 1 && ${1:-} != -* ]] || { say "$(sed -n '/^# Usage/,/^[^#]/s/^# \{0,1\}//p' "$0")"; exit 0; }

GPU=${GPU:-cuda} STEPS=${STEPS:-30} OUT=${1:-./gpu_check}
[[ ! -e $OUT ]] || fail "$OUT is there already: remove it, or name another folder"
set_up requirements.txt
read -r _ _ COUNT _ <<<"$PROBED"
[[ $GPU != cpu ]] || COUNT=2
((COUNT > 0)) || fail "torch can use no GPU here${PROBED#"${PROBED%%$'\n'*}"}"
mkdir -p "$OUT"
export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH} PYTORCH_ALLOC_CONF=expandable_segments:True
LOG=$OUT/check.log FIGURES='' FAILED=0
TWO=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=2)

# check WHAT COMMAND…: runs it, and says how it ended.
check() {
  local result=ok
  printf '\n==== %s: %s\n' "$1" "${*:2}" >>"$LOG"
  timeout 300 "${@:2}" >>"$LOG" 2>&1 </dev/null || result=FAILED FAILED=1
  say "$(printf '%4d s  %-6s  %s' "$SECONDS" "$result" "$1")"
}

# train WHAT PROCESSES RUN FLAG…: trains on the sample into the folder RUN.
train() {
  local start=("$PYTHON")
  [[ $2 == 1 ]] || start=("${TWO[@]}")
  check "$1" "${start[@]}" "$REPO/train_mixer.py" --train-data "$OUT/sample/train.csv" --val-data "$OUT/sample/val.csv" \
    --formatter hisco --target-cols hisco_1 hisco_2 hisco_3 --language-col lang --quiet --log-interval 1 \
    --device "$GPU" --save-path "$OUT/$3" "${@:4}"
}

# same WHAT RUN RUN DIFFERENCE [COLUMN…]: whether losses of two runs differ by less, relatively, in the steps of both.
same() {
  check "$1" "$PYTHON" -c '
import csv, sys
one, other = ({row["step"]: row for row in csv.DictReader(open(path))} for path in sys.argv[1:3])
names = sys.argv[4:] or ("train_loss", "train_loss_linear", "train_loss_seq2seq", "val_loss")
pairs = [(one[step][name], other[step][name]) for step in one.keys() & other.keys() for name in names]
found = [abs(float(a) - float(b)) / abs(float(a)) for a, b in pairs if a and b]
print(len(found), "losses, greatest relative difference", max(found, default=float("nan")))
sys.exit(not found or not max(found) <= float(sys.argv[3]))' "$OUT/$2/logs.csv" "$OUT/$3/logs.csv" "${@:4}"
}

# figures RUN: of a run speed_… its speed, of others the accuracies of the last validation, to be printed at the end.
figures() {
  FIGURES+="$(printf '%-20s' "$1")$("$PYTHON" -c '
import csv, statistics, sys
rows = list(csv.DictReader(open(sys.argv[1])))
forms = {"samples_per_sec": "{:,.0f} samples/s", "mfu": "{:.1%} of matrix products",
         "seconds_data": "{:.4f} s of a step waiting for data"}
rows = rows[len(rows) // 4 :]  # the first steps are slower
if "/speed_" not in sys.argv[1]:
    forms, rows = {"seq_acc": "seq_acc {:.1%}", "flat_acc": "flat_acc {:.1%}"}, rows[-1:]
values = {name: [float(row[name]) for row in rows if row[name]] for name in forms}
print(", ".join(forms[name].format(statistics.median(found)) for name, found in values.items() if found))' "$OUT/$1/logs.csv" 2>&1 | tail -n 1)"$'\n' || true  # a run that failed has none
}

# Dropout differs between devices and numbers of processes, and the second part of the fit of n-grams is chaotic.
SMALL=(--model-size tiny --global-batch-size 64 --dropout 0 --encoder-dropout 0 --ngram-dropout 0)
SMALL+=(--max-steps "$STEPS" --eval-interval "$STEPS")
EXACT=("${SMALL[@]}" --ngrams none) HALF=$((STEPS / 2))
LARGE=(--model-size "${SIZE:-base}" --ngrams none --batch-size "${BATCH:-256}" --max-steps "$STEPS")

check doctor "$PYTHON" -m histocc.doctor --device "$GPU" --save-path "$OUT"
check sample "$PYTHON" -m histocc.sample --rows "${ROWS:-4000}" --seed 1 --split-dir "$OUT/sample"

# ---- the numbers of a CPU
train 'float64 on a CPU' 1 cpu64 "${EXACT[@]}" --float64 --device cpu
train float64 1 gpu64 "${EXACT[@]}" --float64
same 'float64 is that of a CPU, to 1e-8' cpu64 gpu64 1e-8
for format in no-bf16 bf16 fp16; do  # without a format: float32, on GPUs by TF32
  train "${format/no-bf16/float32}" 1 "$format" "${EXACT[@]}" "--$format"
  same "${format/no-bf16/float32} is within 2 %" cpu64 "$format" 0.02
done
train 'n-grams on a CPU' 1 ngrams_cpu "${SMALL[@]}" --device cpu
train n-grams 1 ngrams "${SMALL[@]}"
same 'their validation is within 2 %' ngrams_cpu ngrams 0.02 val_loss
train 'an interrupted run' 1 resumed "${EXACT[@]}" --float64 --max-steps "$HALF"
train 'and its end' 1 resumed "${EXACT[@]}" --float64
same 'resumed is uninterrupted, to 1e-9' gpu64 resumed 1e-9

# ---- coding
for decoder in flat greedy both topk full; do
  for place in cpu "$GPU"; do
    check "predict, $decoder on $place" "$PYTHON" -m histocc.predict --model "$OUT/ngrams" --input "$OUT/sample/val.csv" \
      --language-column lang --decoder "$decoder" --system coded --device "$place" --output "$OUT/$decoder.$place.csv" --overwrite --quiet
  done
  check "codes of $decoder are those of a CPU in 99 % of rows" "$PYTHON" -c '
import csv, sys
one, other = ([[v for k, v in row.items() if k.startswith("coded_")] for row in csv.DictReader(open(path))] for path in sys.argv[1:])
same = sum(map(list.__eq__, one, other)) / len(one)
sys.exit(print(f"{same:.2%}") or len(one) != len(other) or same < 0.99)' "$OUT/$decoder.cpu.csv" "$OUT/$decoder.$GPU.csv"
done
check evaluate "$PYTHON" -m histocc.evaluate --model "$OUT/ngrams" --data "$OUT/sample/val.csv" --device "$GPU" --overwrite

# ---- memory, speed, accuracy
train 'dry run' 1 dry "${LARGE[@]}" --bf16 --dry-run
FIGURES+=$(sed -n 's/^  Memory: /memory, bf16        /p' "$LOG" | tail -n 1)$'\n'
train 'speed in float32' 1 speed_float32 "${LARGE[@]}" --no-bf16 --num-workers 2 --pin-memory
train 'speed in bf16' 1 speed_bf16 "${LARGE[@]}" --bf16 --num-workers 2 --pin-memory
train profile 1 profile "${LARGE[@]}" --bf16 --profile 3
train 'accuracy with an encoder' 1 with_encoder --model-size "${SIZE:-base}" --use-amp --num-epochs 10
train 'accuracy of n-grams alone' 1 ngrams_alone --model-size ngrams --prior none
RUNS=(speed_float32 speed_bf16 with_encoder ngrams_alone)
if [[ $GPU != cpu ]]; then
  train 'compiled layers' 1 speed_compiled "${LARGE[@]}" --bf16 --compile
  RUNS+=(speed_compiled)
  check 'beside a plain model' "$PYTHON" -m benchmarks.speed --device "$GPU" --size base --batch 256 --rounds 2 --steps 5
fi

# ---- two GPUs
if ((COUNT > 1)); then
  check 'doctor on two' "${TWO[@]}" -m histocc.doctor --device "$GPU" --save-path "$OUT"
  for mode in ddp fsdp; do
    train "$mode in float64" 2 "two_$mode" --distributed "${EXACT[@]}" --float64 --parallel "$mode"
    same "$mode is one process, to 1e-8" gpu64 "two_$mode" 1e-8
  done
  train 'fsdp in bf16' 2 two_bf16 --distributed "${EXACT[@]}" --bf16 --parallel fsdp
  train 'fsdp in fp16' 2 two_fp16 --distributed "${EXACT[@]}" --fp16 --parallel fsdp
  train 'begun on two' 2 mixed --distributed "${EXACT[@]}" --float64 --max-steps "$HALF"
  train 'ended on one' 1 mixed "${EXACT[@]}" --float64
  same 'that is one process, to 1e-8' gpu64 mixed 1e-8
  train 'speed on two' 2 speed_two --distributed "${LARGE[@]}" --bf16
  RUNS+=(speed_two)
fi

for run in "${RUNS[@]}"; do figures "$run"; done
say '' "$FIGURES" "$( ((FAILED)) && echo "Something FAILED: $LOG says why." || echo "All checks are ok. Log: $LOG")"
exit "$FAILED"
