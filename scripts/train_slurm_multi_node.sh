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
if [ -z "${BASH_VERSION:-}" ]; then                   # started with another shell: sh SCRIPT
  command -v bash >/dev/null || { echo "error: $0 needs bash, which was not found: install it" >&2; exit 2; }
  exec bash -- "$0" "$@"
fi
set +o posix                                          # where sh is bash, it is so in its POSIX mode
set -euo pipefail

usage() {
  cat <<'EOF'
Usage: sbatch [OPTIONS OF SBATCH] scripts/train_slurm_multi_node.sh [NUM] DATA [--print-only] [-- FLAGS]

  sbatch scripts/train_slurm_multi_node.sh data.csv -- --num-epochs 3 --save-path ./output
  sbatch --nodes=4 --partition=gpu --time=48:00:00 scripts/train_slurm_multi_node.sh data_folder -- --save-dir ./output
  sbatch --gres=none --cpus-per-task=8 scripts/train_slurm_multi_node.sh 2 data.csv -- --device cpu --save-path ./output
  sbatch --array=0-4 scripts/train_slurm_multi_node.sh data.csv -- --seed %a --save-path ./run%a

Trains on all nodes of a SLURM job: one torchrun per node, one process per GPU. Submit it in
the folder of histocc. Data, code and save folder must lie where all nodes see them. Output:
logs/train_JOBID.out and .err. Nodes, GPUs and time: the lines at the top of the script.

  NUM           number of processes of a node (default: its GPUs; without GPUs two)
  DATA          a CSV or Parquet file, which finetune.py splits into training and
                validation, or a folder with train.csv and val.csv (or .parquet),
                for train_mixer.py
  --print-only  print what would run and stop; nothing is installed or written
  -- FLAGS      flags of the training script, as for launch_training.sh

Three minutes before the time limit the training saves, ends, and the job goes back into the
queue; started again, it goes on from there, also where FLAGS hold --overwrite. In an array
each task needs a save folder of its own: %a in a flag is the task's number.
EOF
}

for word in "$@"; do
  case $word in
    -h | --help) usage; exit 0 ;;
    --) break ;;
  esac
done
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  printf 'error: this is a job for SLURM: sbatch %s DATA [-- FLAGS]\n' "$0" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}"                          # SLURM runs a copy of this file, elsewhere
if [[ ! -f scripts/common.sh ]]; then
  printf 'error: %s is not the folder of histocc: cd there and submit the job again\n' "$PWD" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh

read_arguments "$@"
JOB=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then            # the bare number may stand for all tasks of the array
  JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  FLAGS=(${FLAGS[@]+"${FLAGS[@]//%a/$SLURM_ARRAY_TASK_ID}"})
fi
[[ -n $DATA ]] || data_are_missing 'sbatch scripts/train_slurm_multi_node.sh [NUM] DATA'
choose_script
set_up requirements.txt
read_config
[[ " ${CONFIG[*]-}" != *' --overwrite='* ]] || fail "overwrite in a config would start anew after every requeue: give --overwrite on the command line"
if ((${SLURM_RESTART_COUNT:-0} > 0)) && has_flag --overwrite; then
  say "The job was started before: --overwrite is left out, so that the run goes on"
  KEPT=()
  for flag in "${FLAGS[@]}"; do
    [[ $flag == --overwrite ]] || KEPT+=("$flag")
  done
  FLAGS=(${KEPT[@]+"${KEPT[@]}"})
fi
choose_processes all                                 # those of a node; this is the first node of the job
describe_columns
choose_save_path

# The first node runs this script and holds the meeting point of the processes.
NNODES=$SLURM_JOB_NUM_NODES NODE_RANK='' NUMBERED_BY_SRUN=1
MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
MASTER_PORT=${MASTER_PORT:-$(free_port)}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((${SLURM_CPUS_PER_TASK:-$(cores)} + PROCESSES - 1) / PROCESSES))}
export OMP_NUM_THREADS
make_command
say "Job:         $JOB on $NNODES node(s): ${SLURM_JOB_NODELIST:-}, start number $((${SLURM_RESTART_COUNT:-0} + 1))"
say_command
[[ -z $PRINT_ONLY ]] || exit 0

# One torchrun per node, whose number on the job is that of its node. Where one fails all end.
# shellcheck disable=SC2016  # the variables are those of the node
srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun "${COMMAND[@]}" &
steps=$!
limit_is_near=''
trap 'limit_is_near=1; say "The time limit is near: asking the training to save and end"; scancel --signal=USR1 "$JOB" || true' USR1
trap : TERM                                           # SLURM tells the training itself; this script waits for it

status=0
while kill -0 "$steps" 2>/dev/null; do
  status=0
  wait "$steps" || status=$?                          # a signal ends `wait` early
done
if [[ -n $limit_is_near && $status != 0 ]]; then      # torchrun ends with 1 after a signal
  say "Job $JOB goes back into the queue; the same command goes on from the last checkpoint"
  scontrol requeue "$JOB"
  sleep 60                                            # SLURM ends this script
fi
exit "$status"
