#!/usr/bin/env bash
#SBATCH --job-name=histocc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err
##SBATCH --partition=gpu
#
# What stands above can be changed here or on the command line of sbatch.
if [ -z "${BASH_VERSION:-}" ]; then  # started with another shell: sh SCRIPT
  command -v bash >/dev/null || { echo "error: $0 needs bash, which was not found: install it" >&2; exit 2; }
  exec bash -- "$0" "$@"
fi
set +o posix -euo pipefail           # where sh is bash, it is so in its POSIX mode
[[ -n ${SLURM_JOB_ID:-} ]] || SLURM_SUBMIT_DIR=$(dirname -- "$0")/..
cd "${SLURM_SUBMIT_DIR:-.}"          # SLURM runs a copy of this file, elsewhere
if [[ ! -f scripts/common.sh ]]; then
  echo "error: $PWD is not the folder of histocc: cd there and submit the job again" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh
launch train_slurm_multi_node "$@"
