#!/usr/bin/env bash
# Usage: ./run_multi_gpu_train.sh DATA [NUM] [--print-only] [-- FLAGS]
#
#   ./run_multi_gpu_train.sh data.csv
#   ./run_multi_gpu_train.sh data.csv 4 -- --batch-size 64 --language en --save-path ./mine
#
# Trains with torchrun on all GPUs of this machine; without GPUs, on CPU processes. The
# learning rate is multiplied by the number of processes (--lr-scaling linear), unless
# FLAGS hold --lr-scaling or --global-batch-size.
#
#   DATA          a table (CSV, .xlsx, .dta …), which finetune.py splits into training and
#                 validation, or a folder with train.csv and val.csv (or .xlsx …),
#                 for train_mixer.py
#   NUM           number of processes, or all (default: all GPUs; without GPUs two)
#   --print-only  print what would run and stop; nothing is installed or written
#   -- FLAGS      flags of the training script; python finetune.py --help lists them
#
# CUDA_VISIBLE_DEVICES, MODEL_SIZE, SCRIPT, MASTER_PORT, NNODES and all else are as
# ./launch_training.sh --help has them.

[ -n "${BASH_VERSION:-}" ] || exec bash -- "$0" "$@"  # started with another shell: sh run_multi_gpu_train.sh
set +o posix -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/scripts/common.sh"

read_arguments "$@"
choose_training no-sample
flag lr-scaling global-batch-size || CHOSEN+=(--lr-scaling linear)
set_up requirements.txt
choose_processes all
choose_meeting_point
make_command
start "${COMMAND[@]}"
