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
#SBATCH --output=train_%j.out
##SBATCH --partition=gpu
#
# What stands above can be changed here or on the command line of sbatch.
#
# Usage: sbatch [OPTIONS OF SBATCH] scripts/train_slurm_multi_node.sh [NUM] [DATA] [--print-only] [-- FLAGS]
#
#   sbatch scripts/train_slurm_multi_node.sh
#   sbatch scripts/train_slurm_multi_node.sh data.csv -- --num-epochs 3 --save-path ./output
#   sbatch --nodes=4 --partition=gpu --time=48:00:00 scripts/train_slurm_multi_node.sh data_folder -- --save-dir ./output
#   sbatch --gres=none --cpus-per-task=8 scripts/train_slurm_multi_node.sh 2 data.csv -- --device cpu --save-path ./output
#   sbatch --array=0-4 scripts/train_slurm_multi_node.sh data.csv -- --seed %a --save-path ./run%a
#
# Trains on all nodes of a SLURM job: one torchrun per node, one process per GPU. Submit it in
# the folder of histocc. Data, code and save folder must lie where all nodes see them. Nodes,
# GPUs and time: the lines at the top of the script. A job script of your own needs no torchrun:
# srun python finetune.py … with one task per GPU.
#
# Output: logs/train_JOBID.out and .err there (in an array JOBID_TASK), or what --output and
# --error of sbatch name. What went wrong before logs/ was there is in train_JOBID.out.
#
#   NUM           number of processes of a node (default: its GPUs; without GPUs two)
#   DATA          a table (CSV, .xlsx, .dta …), which finetune.py splits into training and
#                 validation, or a folder with train.csv and val.csv (or .xlsx …),
#                 for train_mixer.py; with SCRIPT=examples/train_llada.py what that takes.
#                 Without DATA: the built-in model, on the lists of titles and a sample
#   --print-only  print what would run and stop; nothing is installed or written
#   -- FLAGS      flags of the training script, as for launch_training.sh
#
# Three minutes before the time limit the training saves, ends, and the job goes back into the
# queue; started again, it continues from there, also if FLAGS hold --overwrite. In an array
# each task needs its own save folder: %a in a flag is the task's number.

[ -n "${BASH_VERSION:-}" ] || exec bash -- "$0" "$@"  # started with another shell
set +o posix -euo pipefail
[[ -n ${SLURM_JOB_ID:-} ]] || SLURM_SUBMIT_DIR=$(dirname -- "$(readlink -f -- "$0")")/..  # for --help
if ! cd "${SLURM_SUBMIT_DIR:-.}" || [[ ! -f scripts/common.sh ]]; then  # SLURM runs a copy of this file, elsewhere
  echo "error: $PWD is not the folder of histocc: cd there and submit the job again" >&2
  exit 2
fi
JOB=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-${SLURM_JOB_ID:-}}

# SLURM opens its file before there may be a folder logs/, so the output moves there, unless sbatch was told otherwise.
OPENED=train_${SLURM_JOB_ID:-}.out
if [[ /dev/fd/1 -ef $OPENED ]] && mkdir -p logs; then
  [[ ! /dev/fd/2 -ef $OPENED ]] || exec 2>>"logs/train_$JOB.err"
  exec >>"logs/train_$JOB.out"
  cat "$OPENED" && rm "$OPENED"
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh

# In an array, %a is the number of the task, which is part of the name of its job: the bare number may stand for all.
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || set -- "${@//\%a/$SLURM_ARRAY_TASK_ID}"
read_arguments "$@"
[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a job for SLURM: sbatch $0 [DATA] [-- FLAGS]"
whole_numbers SLURM_RESTART_COUNT SLURM_JOB_NUM_NODES

# --overwrite counts for the first start alone: after a requeue the run continues.
RESTARTS=${SLURM_RESTART_COUNT:-0}
if [[ -f $CONFIG ]] && grep -Eq '^ *overwrite *= *true' "$CONFIG"; then
  fail 'overwrite in a config would start over after every requeue: give --overwrite on the command line'
fi
if ((RESTARTS > 0)) && flag overwrite; then
  say 'The job was started before: --overwrite is left out, so that the run continues'
  for word in "$@"; do
    shift
    [[ $word == --overwrite ]] || set -- "$@" "$word"
  done
  read_arguments "$@"
fi

choose_training sample
set_up requirements.txt
choose_processes all
# The processes meet on this node, the first one; srun numbers the nodes.
NODES=${SLURM_JOB_NUM_NODES:-1} NODE='' ADDRESS=${MASTER_ADDR:-$(uname -n)} PORT=${MASTER_PORT:-}
free_port
say "Job:         $JOB on $NODES node(s): ${SLURM_JOB_NODELIST:-}, start number $((RESTARTS + 1))"
make_command
write_sample
say_command "${COMMAND[@]}"
[[ -z $PRINT_ONLY ]] || exit 0

# SLURM tells this shell alone that the time limit is near, and all steps of the job itself that it is cancelled.
NEAR_LIMIT=''
trap 'SIGNAL=USR1 NEAR_LIMIT=1; say "The time limit is near: asking the training to save and end"
  scancel --signal=USR1 "$JOB" || true' USR1
trap 'SIGNAL=TERM' TERM
# One torchrun for each node, whose number in the job is that of its node. Where one fails, all end.
# shellcheck disable=SC2016  # the shell on the node reads it
srun "--nodes=$NODES" "--ntasks=$NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 \
  ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
  bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun "${COMMAND[@]}" </dev/null &
CHILD=$!
if wait_for_child; then show_sample; exit 0; else STATUS=$?; fi
[[ -n $NEAR_LIMIT ]] || exit "$STATUS"  # torchrun ends with 1 after a signal, also where all is saved
say "Job $JOB goes back into the queue; the same command continues from the last checkpoint"
scontrol requeue "$JOB"
sleep 60  # SLURM ends this shell
exit "$STATUS"
