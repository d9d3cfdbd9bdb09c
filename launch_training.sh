#!/usr/bin/env bash
# Usage: ./launch_training.sh [NUM] [DATA] [--print-only] [-- FLAGS]
#
#   ./launch_training.sh
#   ./launch_training.sh 4 data.csv -- --model-size tiny --num-epochs 3 --language en --save-path ./mine
#
# Trains with torchrun on NUM processes: a GPU each where there are GPUs, else on CPUs. The
# learning rate is taken as given (run_multi_gpu_train.sh multiplies it by NUM).
#
#   NUM           number of processes, or all (default: 2; 1 where there is one GPU). At most
#                 the number of GPUs; on CPUs at most four for each core, or 8
#   DATA          a table (CSV, .xlsx, .dta …), which finetune.py splits into training and
#                 validation, or a folder with train.csv and val.csv (or .xlsx …),
#                 for train_mixer.py. Without DATA: the built-in model, on the lists of titles
#                 and a sample, and then twelve descriptions coded with it
#   --print-only  print what would run and stop; nothing is installed or written
#   -- FLAGS      flags of the training script; python finetune.py --help lists them.
#                 Without --save-path the run is kept in ./output
#
# From the environment:
#   CUDA_VISIBLE_DEVICES  GPUs to use; empty: none
#   MODEL_SIZE            ngrams, tiny, small or base
#   SCRIPT                training script to start instead of histocc's; one that says
#                         DATA_FLAG = "--flag" gets DATA there, whatever it is
#   MASTER_PORT           port of the processes (default: a free one)
#   NNODES, NODE_RANK, MASTER_ADDR
#                         several machines: their number, the number of this one (0, 1, ...)
#                         and the first one's name; the same command on each of them
#   OMP_NUM_THREADS       threads of a process (default: cores / processes)
#
# The same command, given again, continues where the run stopped. Uses the active Python
# environment if it has torch 2.10 or newer and numpy, else makes .venv beside this script.
# The exit code is torchrun's; 2 where the arguments are wrong and nothing was started.

[ -n "${BASH_VERSION:-}" ] || exec bash -- "$0" "$@"  # started with another shell: sh launch_training.sh
set +o posix -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/scripts/common.sh"

read_arguments "$@"
choose_training sample
set_up requirements.txt
choose_processes 2
choose_meeting_point
make_command
[[ -n $SAMPLE ]] || start "${COMMAND[@]}"

write_sample
run_and_wait "${COMMAND[@]}"
show_sample
[[ -z $PRINT_ONLY ]] || exit 0
say "Took $((SECONDS / 60)) min $((SECONDS % 60)) s in all."
if [[ $PYTHON == "$VENV"/* && ${VIRTUAL_ENV:-} != "$VENV" ]]; then
  say 'For the program histocc: source .venv/bin/activate'
fi
[[ -x ${PYTHON%/*}/histocc ]] || command -v histocc >/dev/null ||
  say 'The program histocc is not installed in this environment yet: pip install --no-deps -e .'
say 'Next, your own data: histocc train data.csv --output ./mine'
