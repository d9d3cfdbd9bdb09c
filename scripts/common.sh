# shellcheck shell=bash
# What the launchers and tests/run have in common. Sourced, never run. Written for bash 3.2 too, where an array that
# may be empty must be read as ${FLAGS[@]+"${FLAGS[@]}"}.

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
PRINT_ONLY=''
EXPECTED_DATA='DATA is a table (CSV, .xlsx, .dta …), or a folder with train.csv and val.csv (or .xlsx …)'
DATA_FLAGS=(dataset data train-data data-dir data-root val-data)

# A closed descriptor would be given to the next file that a process opens, and what is printed would go there.
{ true <&0; } 2>/dev/null || exec </dev/null
{ true >&1; } 2>/dev/null || exec >/dev/null
(true >&2) || exec 2>/dev/null

# say LINE…: prints, and succeeds whatever becomes of that: a full disk, a closed pipe or terminal ends no run.
# The subshell also keeps SIGPIPE and what could not be written away from this shell.
say() {
  { (printf '%s\n' "$@"); } 2>/dev/null || true
}

# fail LINE…: says what is wrong and ends with 2, as the scripts do for a user's mistake.
fail() {
  (printf 'error: %s\n' "$1" && shift && { (($# == 0)) || printf '  %s\n' "$@"; }) >&2 || true
  exit 2
}

# shellcheck source=scripts/environment.sh
source "$REPO/scripts/environment.sh"

# ---- what the user asks for ----

# read_arguments ARGUMENT…: [NUM] [DATA] [--print-only] [-- FLAGS], NUM and DATA in either order. Sets NUM, DATA,
# PRINT_ONLY, FLAGS, and CONFIG, the file of --config. The help is the comment at the top of the launcher.
read_arguments() {
  NUM='' DATA='' CONFIG='' FLAGS=()
  while (($#)); do
    case $1 in
      --) FLAGS=("${@:2}"); break ;;
      --print-only) PRINT_ONLY=1 ;;
      -h | --help) say "$(sed -n '/^# Usage/,/^[^#]/s/^# \{0,1\}//p' "$0")"; exit 0 ;;
      -*) fail "unknown option $1. Flags for the training script stand after --: [NUM] [DATA] -- $1" ;;
      *) read_number_or_data "$1" ;;
    esac
    shift
  done
  if [[ -n $DATA ]] && flag "${DATA_FLAGS[@]}"; then
    fail "DATA is $DATA, and the flags behind -- name data, too: give one of them"
  fi
  ! flag config || CONFIG=$VALUE
}

read_number_or_data() {
  if [[ $1 == all || $1 =~ ^[0-9]+$ ]]; then
    [[ -z $NUM ]] || fail "NUM is given twice: $NUM and $1. Flags for the training script stand after --"
    [[ $1 == all || $1 =~ [1-9] ]] || fail "NUM is the number of processes: at least 1"
    NUM=$1
  else
    [[ -e $1 ]] || fail "$1: no such file or folder, and no number of processes." "$EXPECTED_DATA"
    [[ -z $DATA ]] || fail "DATA is given twice: $DATA and $1. Flags for the training script stand after --"
    DATA=$1
  fi
}

# flag NAME…: whether the user gives one of these flags, among FLAGS or in the file of --config. Sets VALUE.
flag() {
  local word name names="$*" value_follows='' found=1 line
  VALUE=''
  for word in ${FLAGS[@]+"${FLAGS[@]}"}; do
    [[ -z $value_follows ]] || VALUE=$word
    value_follows='' name=${word%%=*}
    name=${name//_/-}
    if [[ $name == --* && " $names " == *" ${name#--} "* ]]; then
      found=0 VALUE=''
      if [[ $word == *=* ]]; then VALUE=${word#*=}; else value_follows=1; fi
    fi
  done
  [[ $found == 1 && -f $CONFIG ]] || return "$found"
  names=${names//-/[-_]}
  line=$(sed -nE "s/^[[:space:]\"]*(${names// /|})\"?[[:space:]]*[=:][[:space:]]*//p" "$CONFIG" | tail -n 1)
  [[ -n $line && $line != null* && $line != false* && $line != '"auto"'* ]] || return 1  # an args.json names every flag
  VALUE=${line#\"}
  VALUE=${VALUE%%\"*}
}

# choose_training sample|no-sample: the script that trains on DATA, with which flags, and where; without DATA on the
# sample, or not at all. Sets SCRIPT, CHOSEN (flags; those of the user come behind them and win), SAVE and SAMPLE.
choose_training() {
  local data_flag='' part
  SCRIPT=${SCRIPT:-} CHOSEN=(--distributed) SAMPLE=''
  [[ -z $SCRIPT || -f $SCRIPT ]] || fail "SCRIPT=$SCRIPT: no such file"
  [[ -z $SCRIPT ]] || data_flag=$(sed -nE "s/^DATA_FLAG *= *[\"'](--[A-Za-z0-9_-]+)[\"'].*/\1/p" "$SCRIPT")
  if [[ -n $data_flag ]]; then  # it may have data of its own
    [[ -z $DATA ]] || CHOSEN+=("$data_flag" "$DATA")
    [[ $data_flag != --config ]] || CONFIG=$DATA
  elif [[ -z $DATA ]]; then
    if [[ $1 == no-sample ]] || flag "${DATA_FLAGS[@]}"; then
      fail "DATA is missing: $0 --help says where it stands." "$EXPECTED_DATA" \
        "A launcher takes the data from DATA alone: what flags or a file of --config say of them does not count."
    fi
    SAMPLE='the sample of histocc'
  elif [[ -d $DATA ]]; then
    for part in train val; do
      find_table "${DATA%/}" "$part"
      CHOSEN+=("--$part-data" "$TABLE")
    done
  else
    [[ -f $DATA ]] || fail "$DATA is no regular file: a table is read several times." "$EXPECTED_DATA"
    CHOSEN+=(--dataset "$DATA")
    SCRIPT=${SCRIPT:-$REPO/finetune.py}
  fi
  SCRIPT=${SCRIPT:-$REPO/train_mixer.py}
  choose_folder
  [[ -n $SAMPLE ]] || return 0
  CHOSEN+=(--train-data "$SAVE/sample/train.csv" --val-data "$SAVE/sample/val.csv" --formatter hisco)
  CHOSEN+=(--target-cols hisco_1 hisco_2 hisco_3 --language-col lang --model-size ngrams)
  # N-grams alone become the built-in model. Others take steps: any number of processes makes the same total batch.
  SAMPLE_ROWS=(--built-in)
  flag model-size || VALUE=${MODEL_SIZE:-ngrams}
  if [[ $VALUE != ngrams ]] || flag max-steps; then
    SAMPLE_ROWS=(--rows 40000 --seed 1)
    CHOSEN+=(--num-epochs 1 --batch-size 32 --global-batch-size 64)
  else
    CHOSEN+=(--seq2seq-weight 0)
  fi
}

# find_table FOLDER NAME: sets TABLE to the table NAME of a folder.
find_table() {
  local found=() ending
  for ending in csv csv.gz tsv jsonl parquet xlsx xls ods dta sav xpt sas7bdat; do
    [[ ! -f $1/$2.$ending ]] || found+=("$1/$2.$ending")
  done
  ((${#found[@]} > 0)) || fail "$1 is a folder without $2.csv." "$EXPECTED_DATA"
  ((${#found[@]} == 1)) || fail "$1 holds several tables: ${found[*]}. Leave one."
  TABLE=${found[0]}
}

# Sets SAVE, the folder of the run. The sample and other data never share one, unless the user says so.
choose_folder() {
  local named=1 of_sample=''
  flag output save-path save-dir checkpoint-dir || named=''
  SAVE=${VALUE:-./output}
  [[ -n $named ]] || CHOSEN+=(--save-dir "$SAVE")
  [[ -e $SAVE/last.bin ]] && ! flag overwrite || return 0
  ! grep -qs 'sample/train\.csv"' "$SAVE/args.json" || of_sample=1
  if [[ -n $SAMPLE && -z $of_sample ]]; then
    fail "$SAVE holds another run. Train on the sample elsewhere: $0 -- --save-path DIR"
  elif [[ -z $SAMPLE && -z $named && -n $of_sample ]]; then
    fail "$SAVE holds the run on the sample." \
      "Choose another folder with -- --save-path DIR, or replace that run with -- --overwrite"
  fi
}

# whole_numbers NAME…: fails if one of these variables is set to anything else, which bash cannot compute with.
whole_numbers() {
  local name
  for name; do
    [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$name=${!name}: set it to a whole number, or unset it"
  done
}

# ---- the machine ----

# usable_cores: the cores that this process may use and the limits of its cgroups, of both versions, allow.
OWN_CGROUPS=/proc/self/cgroup CGROUPS=/sys/fs/cgroup
usable_cores() {
  local cores controllers path folder quota period
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  while IFS=: read -r _ controllers path; do  # version 2 names no controllers
    folder=$CGROUPS/$controllers${path%/}
    while [[ ${#folder} -ge ${#CGROUPS} ]]; do
      quota=$(cat "$folder/cpu.max" 2>/dev/null || cat "$folder"/cpu.cfs_{quota,period}_us 2>/dev/null || true)
      read -r quota period <<<"${quota//$'\n'/ }"
      if [[ $quota =~ ^[1-9][0-9]*$ && $period =~ ^[1-9][0-9]*$ ]]; then
        quota=$(((quota + period / 2) / period))
        ((quota >= cores)) || cores=$((quota > 0 ? quota : 1))
      fi
      folder=${folder%/*}
    done
  done < <(cat "$OWN_CGROUPS" 2>/dev/null)
  printf '%s\n' "$cores"
}

# choose_processes DEFAULT: a process for each GPU that torch sees, else on the cores. Sets PROCESSES, those of this
# machine, DEVICES in words, and OMP_NUM_THREADS, the threads of each.
choose_processes() {
  local torch='' cuda='' gpus='' rest cores limit why=''
  whole_numbers SLURM_CPUS_PER_TASK
  read -r torch cuda gpus rest <<<"$PROBED"
  # Before there is an environment (--print-only) torch cannot say, and without an NVIDIA driver there is no nvidia-smi.
  [[ -n $PROBED || -z ${CUDA_VISIBLE_DEVICES-all} ]] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  cores=${SLURM_CPUS_PER_TASK:-$(usable_cores)}
  why=${PROBED#*$'\n'} why=${why#"$PROBED"}
  [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || why+=${why:+, }CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES
  [[ $cuda != none ]] || why="torch $torch was built without CUDA"
  why=${why:+ ($why)}
  if flag device && [[ $VALUE == cpu ]]; then gpus=0 why=' (--device cpu)'; fi
  PROCESSES=${NUM:-$1}
  if [[ $PROCESSES == all ]]; then PROCESSES=$((gpus > 0 ? gpus : 2)); fi
  if [[ -z $NUM && $gpus == 1 ]]; then PROCESSES=1; fi
  limit=$((gpus > 0 ? gpus : cores > 2 ? 4 * cores : 8))
  if ((${#PROCESSES} > 9 || 10#$PROCESSES > limit)); then
    ((gpus == 0)) || fail "$PROCESSES processes need a GPU each, but $gpus can be used here$why." \
      "Ask for at most $gpus, set CUDA_VISIBLE_DEVICES to more of them, or train on CPUs with -- --device cpu"
    fail "$PROCESSES processes are too many for the $cores core(s) of this machine: ask for at most $limit"
  fi
  PROCESSES=$((10#$PROCESSES))
  DEVICES="$PROCESSES of $gpus GPU(s)$why"
  ((gpus > 0)) || DEVICES="NO GPU$why: TRAINING ON CPUS, $PROCESSES process(es) on $cores core(s)"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > PROCESSES ? cores / PROCESSES : 1))}
  # batches differ in width: without it a GPU runs out of memory that is free, in pieces
  ((gpus == 0)) || [[ -n ${PYTORCH_ALLOC_CONF-}${PYTORCH_CUDA_ALLOC_CONF-} ]] || export PYTORCH_ALLOC_CONF=expandable_segments:True
}

# choose_meeting_point: where the processes meet, by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. Sets NODES, NODE,
# ADDRESS and PORT. One machine takes another port where its port is in use; several must agree on theirs.
choose_meeting_point() {
  NODES=${NNODES:-1} NODE=${NODE_RANK:-} ADDRESS=127.0.0.1 PORT=${MASTER_PORT:-}
  [[ $NODES =~ ^[1-9][0-9]{0,5}$ ]] || fail "NNODES=$NODES: set it to the number of machines, at least 1"
  [[ -z $PORT || $PORT =~ ^[1-9][0-9]{0,4}$ && $PORT -le 65535 ]] ||
    fail "MASTER_PORT=$PORT: set it to a port, a whole number from 1 to 65535, or leave it out"
  [[ -z $NODE || $NODE =~ ^(0|[1-9][0-9]{0,5})$ && $NODE -lt $NODES ]] ||
    fail "NODE_RANK=$NODE, but NNODES=$NODES: set NODE_RANK to the number of this machine, from 0 to NNODES - 1"
  if ((NODES > 1)); then
    [[ -n $NODE && -n ${MASTER_ADDR:-} ]] || fail \
      "NNODES=$NODES needs MASTER_ADDR, the first machine, and NODE_RANK, 0 on that machine and 1, 2, … on others." \
      "On each of them: NNODES=$NODES NODE_RANK=0 MASTER_ADDR=${MASTER_ADDR:-$(uname -n)} MASTER_PORT=29500 $0 …"
    ADDRESS=$MASTER_ADDR PORT=${PORT:-29500}
  else
    free_port
  fi
}

# free_port: sets PORT to one that is free, where it is empty or in use.
free_port() {
  [[ -n $PROBED ]] || { PORT=${PORT:-29500}; return; }  # --print-only, before there is an environment
  PORT=$("$PYTHON" -c '
import socket, sys
for port in (*sys.argv[1:], 0):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", int(port)))
        except OSError:
            continue
        sys.exit(print(held.getsockname()[1]))
' ${PORT:+"$PORT"})
}

# ---- starting ----

# check_address: fails if this machine does not know the host ADDRESS, for which torchrun would wait for minutes.
check_address() {
  [[ -z $PRINT_ONLY ]] || return 0
  "$PYTHON" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$ADDRESS" 2>/dev/null ||
    fail "MASTER_ADDR=$ADDRESS: this machine knows no host of that name. Set it to the first machine's name or IP address"
}

# make_command: sets COMMAND, the torchrun command line of this machine, and says on what it will run.
make_command() {
  local machines='' signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
  check_address
  [[ $(trap -p HUP) != *"''"* ]] || signals=${signals/SIGHUP,/}  # under nohup it stays ignored
  COMMAND=("$PYTHON" -m torch.distributed.run "--nnodes=$NODES" "--nproc-per-node=$PROCESSES")
  COMMAND+=("--master-addr=$ADDRESS" "--master-port=$PORT" ${NODE:+"--node-rank=$NODE"})
  # The options of torchrun that this torch has: to save at a signal, and to have the time for it.
  [[ -n $PROBED && $PROBED != *--signals-to-handle* ]] || COMMAND+=("--signals-to-handle=$signals")
  [[ -n $PROBED && $PROBED != *--shutdown-timeout* ]] || COMMAND+=(--shutdown-timeout=120)
  # A process computes on the cores whose memory its GPU is next to.
  [[ $DEVICES == 'NO GPU'* || $PROBED != *--numa-binding* ]] || COMMAND+=(--numa-binding=node)
  [[ -z ${MODEL_SIZE:-} ]] || flag model-size || CHOSEN+=(--model-size "$MODEL_SIZE")
  COMMAND+=("$SCRIPT" "${CHOSEN[@]}" ${FLAGS[@]+"${FLAGS[@]}"})
  export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}  # for the processes, in whatever folder
  ((NODES == 1)) || machines=" on each of $NODES machines"
  say "Data:        ${DATA:-${SAMPLE:-those of the script}}" "Processes:   $PROCESSES$machines" \
    "Devices:     $DEVICES" "Threads:     OMP_NUM_THREADS=$OMP_NUM_THREADS" "Save path:   $SAVE"
}

say_command() {
  say 'Command:' "$(printf ' %q' "$@")"
}

# start COMMAND…: becomes the command, which keeps the number of this process and hears its signals.
start() {
  say_command "$@"
  [[ -z $PRINT_ONLY ]] || exit 0
  exec "$@"
}

# run_and_wait COMMAND…: runs it, passes the signals of this shell on to it, and returns its exit code.
run_and_wait() {
  local name
  say_command "$@"
  [[ -z $PRINT_ONLY ]] || return 0
  CHILD=''
  # shellcheck disable=SC2064  # the name of the signal is that of now
  for name in HUP INT QUIT TERM USR1; do trap "pass_on $name" "$name"; done
  set -m  # or the child would ignore SIGINT, as what a script starts in the background does
  "$@" </dev/null &
  CHILD=$!
  set +m
  [[ -z ${SIGNAL:-} ]] || kill -s "$SIGNAL" "$CHILD" || true  # it came before the child was there
  wait_for_child
}

# write_sample, show_sample: before and after the training on the sample, where there is no DATA.
write_sample() {
  [[ -z $SAMPLE ]] || run_and_wait "$PYTHON" -m histocc.sample "${SAMPLE_ROWS[@]}" --split-dir "$SAVE/sample"
}

show_sample() {
  [[ -z $SAMPLE ]] || flag dry-run prepare-only || run_and_wait "$PYTHON" -m histocc.sample.show --model "$SAVE"
}

pass_on() {
  SIGNAL=$1
  [[ -z $CHILD ]] || kill -s "$1" "$CHILD" 2>/dev/null || true
}

# wait_for_child: the exit code of CHILD. A signal with a trap, which sets SIGNAL, ends a `wait` before the child ends.
wait_for_child() {
  local status
  while SIGNAL=''; do
    if wait "$CHILD"; then status=0; else status=$?; fi
    [[ -n $SIGNAL ]] || return "$status"
  done
}
