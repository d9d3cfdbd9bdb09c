#!/usr/bin/env bash
#SBATCH --job-name=histocc-predict
#SBATCH --array=0-19
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=predict_%A_%a.out
##SBATCH --partition=cpu
#
# What stands above can be changed here or on the command line of sbatch.
#
# Usage: sbatch [OPTIONS OF SBATCH] scripts/predict_slurm_array.sh FLAGS OF PREDICT
#
#   sbatch scripts/predict_slurm_array.sh --model ./mine --input tables/ --output coded/
#   sbatch --array=0-99%10 scripts/predict_slurm_array.sh --input tables/ --output coded/
#
# Codes the tables of a folder by tasks that need not run at the same time: each takes its share by
# its number in the array. Submit it in the folder of histocc; model, input and output must lie where
# all nodes see them. After kills, submit the whole array again, in which tasks whose parts are there
# end at once, or one number alone (--array=7), which takes all that is missing. The environment is
# made before, as is the built-in model: ./launch_training.sh

[ -n "${BASH_VERSION:-}" ] || exec bash -- "$0" "$@"  # started with another shell
set +o posix -euo pipefail
[[ -n ${SLURM_JOB_ID:-} ]] || SLURM_SUBMIT_DIR=$(dirname -- "$(readlink -f -- "$0")")/..  # for --help
if ! cd "${SLURM_SUBMIT_DIR:-.}" || [[ ! -f scripts/common.sh ]]; then  # SLURM runs a copy of this file, elsewhere
  echo "error: $PWD is not the folder of histocc: cd there and submit the job again" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh
[[ $# -gt 0 && $1 != -h && $1 != --help ]] || { say "$(sed -n '/^# Usage/,/^[^#]/s/^# \{0,1\}//p' "$0")"; exit 0; }
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || fail "this is an array job for SLURM: sbatch $0 $*"
PRINT_ONLY=1 set_up requirements.txt  # makes nothing: all tasks would make it at once
[[ -n $PROBED ]] || fail 'no environment has torch: ./launch_training.sh --print-only says what makes one'
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
start "$PYTHON" -m histocc.predict "$@"
