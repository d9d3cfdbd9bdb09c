#!/usr/bin/env bash
if [ -z "${BASH_VERSION:-}" ]; then                   # started with another shell: sh run_multi_gpu_train.sh
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
