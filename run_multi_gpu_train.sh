#!/usr/bin/env bash
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"

usage() {
  cat <<'EOF'
Usage: ./run_multi_gpu_train.sh DATA [NUM] [--print-only] [-- FLAGS]

  ./run_multi_gpu_train.sh data.csv
  ./run_multi_gpu_train.sh data.csv 4 -- --batch-size 64 --language en --save-path ./mine

Trains with torchrun on all GPUs of this machine; without GPUs, on CPU processes. The
learning rate is multiplied by the number of processes (--lr-scaling linear), unless
FLAGS hold --lr-scaling or --global-batch-size.

  DATA          a CSV or Parquet file, which finetune.py splits into training and
                validation, or a folder with train.csv and val.csv (or .parquet),
                for train_mixer.py
  NUM           number of processes (default: all GPUs; without GPUs two), or all
EOF
  usage_of_both
}

read_arguments "$@"
[[ -n $DATA ]] || data_are_missing './run_multi_gpu_train.sh DATA [NUM]'
choose_script
set_up requirements.txt
read_config
choose_processes all
describe_columns
choose_save_path
if ! has_flag --lr-scaling --global-batch-size; then
  ARGUMENTS+=(--lr-scaling linear)
fi
start
