#!/usr/bin/env bash
if [ -z "${BASH_VERSION:-}" ]; then                   # started with another shell: sh launch_training.sh
  command -v bash >/dev/null || { echo "error: $0 needs bash, which was not found: install it" >&2; exit 2; }
  exec bash -- "$0" "$@"
fi
set +o posix                                          # where sh is bash, it is so in its POSIX mode
set -euo pipefail
HERE=${BASH_SOURCE[0]}
while [[ -L $HERE ]]; do                              # started through a link
  LINK=$(readlink -- "$HERE")
  [[ $LINK == /* ]] || LINK=$(dirname -- "$HERE")/$LINK
  HERE=$LINK
done
HERE=$(dirname -- "$HERE")
if [[ ! -f $HERE/scripts/common.sh ]]; then
  printf 'error: %s is not the folder of histocc: start this script there, or through a link\n' "$HERE" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source "$HERE/scripts/common.sh"

usage() {
  cat <<'EOF'
Usage: ./launch_training.sh [NUM] [DATA] [--print-only] [-- FLAGS]

  ./launch_training.sh
  ./launch_training.sh 4 data.csv -- --num-epochs 3 --language en --save-path ./mine

Trains with torchrun on NUM processes: a GPU each where there are GPUs, else on CPUs. The
learning rate is taken as given (run_multi_gpu_train.sh multiplies it by NUM).

  NUM           number of processes (default: 2; 1 where there is one GPU), or all
  DATA          a CSV or Parquet file, which finetune.py splits into training and
                validation, or a folder with train.csv and val.csv (or .parquet),
                for train_mixer.py.
                Without DATA: a small model on the sample that comes with histocc,
                and then twelve descriptions coded with it.
EOF
  usage_of_both
}

# Trains on the sample, shows what the model makes of texts that it has never seen. Any number of processes gives the
# same total batch, and so the same result.
train_on_sample() {
  local show=()
  ! has_flag --dataset --train-data --data-dir --data-root --val-data || data_are_missing './launch_training.sh [NUM] DATA'
  SCRIPT=train_mixer.py DATA='the sample of histocc'
  ARGUMENTS=()
  choose_save_path
  if [[ -f $SAVE_PATH/last.bin ]] && ! holds_sample_run && ! has_flag --overwrite; then
    fail "$SAVE_PATH holds another run. Train on the sample elsewhere: ./launch_training.sh -- --save-path DIR"
  fi
  ARGUMENTS+=(--train-data "$SAVE_PATH/sample/train.csv" --val-data "$SAVE_PATH/sample/val.csv"
    --formatter hisco --target-cols hisco_1 hisco_2 hisco_3 --language-col lang
    --model-size tiny --num-epochs 2 --batch-size 32 --global-batch-size 64 --learning-rate 1.5e-3 --warmup-pct 0.1
    --seq2seq-weight 0.9 --encoder-dropout 0 --ngram-dropout 0 --augmentation-prob 0 --unk-lang-prob 0 --log-interval 50 --eval-interval 1000 --save-interval 500)
  make_command
  say_command
  if ! has_flag --dry-run --prepare-only; then        # these make no model
    show=("$PYTHON" -m histocc.sample.show --model "$SAVE_PATH")
    say_words "${show[@]}"
  fi
  [[ -z $PRINT_ONLY ]] || exit 0
  run_and_return "$PYTHON" -m histocc.sample --rows 32000 --seed 1 --split-dir "$SAVE_PATH/sample"
  run_and_return "${COMMAND[@]}"
  ((${#show[@]} > 0)) || return 0
  run_and_return "${show[@]}"
  say "Took $((SECONDS / 60)) min $((SECONDS % 60)) s in all."
  [[ $PYTHON != "$REPO/.venv/"* || ${VIRTUAL_ENV:-} == "$REPO/.venv" ]] || say "For the commands of README.md: source .venv/bin/activate"
  say "Next, your own data: ./launch_training.sh 2 data.csv -- --save-path ./mine"
}

read_arguments "$@"
[[ -z $DATA ]] || choose_script
set_up requirements.txt
read_config
choose_processes 2
if [[ -z $DATA ]]; then
  train_on_sample
  exit
fi
describe_columns
choose_save_path
start
