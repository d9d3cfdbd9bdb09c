# shellcheck shell=bash
# What launch_training.sh, run_multi_gpu_train.sh and tests/run have in common. Sourced, never run.
# Written for bash 3.2 too: an empty array is expanded as ${A[@]+"${A[@]}"}.

REPO=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
PRINT_ONLY=''

# A closed descriptor would be given to the next file that a process opens, and what is printed would go there.
{ true <&0; } 2>/dev/null || exec </dev/null
{ true >&1; } 2>/dev/null || exec >/dev/null
(true >&2) || exec 2>/dev/null

# say LINE…: prints, and succeeds whatever becomes of that: a full disk, a closed pipe or terminal ends no run.
# The subshell also keeps SIGPIPE and what could not be written away from this shell.
say() {
  { (printf '%s\n' "$@"); } 2>/dev/null || true
}

# say_words WORD…: the words as one line that a shell reads as the same words.
say_words() {
  { (printf ' %q' "$@" && echo); } 2>/dev/null || true
}

# fail LINE…: says what is wrong and ends with 2, as the scripts do for a user's mistake.
fail() {
  (printf 'error: %s\n' "$1" && shift && { (($# == 0)) || printf '  %s\n' "$@"; }) >&2 || true
  exit 2
}

# shellcheck source=scripts/environment.sh
source "$REPO/scripts/environment.sh"

# ---- arguments of the launchers ----

# The part of --help that both launchers have.
usage_of_both() {
  cat <<'EOF'
  --print-only  print what would run and stop (so does HISTOCC_LAUNCH_DRY_RUN=1);
                nothing is installed or written; without an environment that has
                torch the columns of DATA are not read
  -- FLAGS      flags of the training script; python finetune.py --help lists them.
                Without --target-cols the columns hisco_1 ... hisco_5 or OCC1950_1/2
                that the file has, and their formatter; --language-col lang where it
                has that column; without --save-path ./output.

From the environment:
  CUDA_VISIBLE_DEVICES  GPUs to use; empty: none
  MODEL_SIZE            tiny, small or base
  SCRIPT                training script to start instead of histocc's
  MASTER_PORT           port of the processes (default: a free one)
  NNODES, NODE_RANK, MASTER_ADDR
                        several machines: their number, the number of this one (0, 1, ...)
                        and the first one's name; the same command on each of them
  OMP_NUM_THREADS       threads of a process (default: cores / processes)

NUM is at most the number of GPUs; on CPUs at most four for each core, or 8 where that
is more.
The same command again goes on where the run stopped. Uses the active Python environment
if it has torch 2.10 or newer and numpy, else makes .venv beside this script. The exit
code is torchrun's; 2 where the arguments are wrong and nothing was started.
EOF
}

# Sets NUM, DATA, FLAGS (those after --), PRINT_ONLY, and NUMBERED_BY_SRUN: whether srun gives each machine its NODE_RANK.
# `usage` is the launcher's own.
read_arguments() {
  OWN_SCRIPT=${SCRIPT:-}
  [[ -z $OWN_SCRIPT || -f $OWN_SCRIPT ]] || fail "SCRIPT=$OWN_SCRIPT: no such file"
  [[ $OWN_SCRIPT != -* ]] || OWN_SCRIPT=./$OWN_SCRIPT
  export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}  # started from another folder, python finds histocc all the same
  NUM='' DATA='' FLAGS=() CONFIG=() NUMBERED_BY_SRUN=''
  PRINT_ONLY=${HISTOCC_LAUNCH_DRY_RUN:-}
  [[ $PRINT_ONLY != 0 ]] || PRINT_ONLY=''
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --print-only) PRINT_ONLY=1 ;;
      --) shift; FLAGS=("$@"); break ;;
      -[0-9]*) fail "NUM=$1: expected the number of processes, at least 1" ;;
      -*) fail "unknown option $1. Flags for the training script stand after --: [NUM] [DATA] -- $1" ;;
      all) set_once NUM all ;;
      *[!0-9]* | '') take_data "$1" ;;
      *) set_once NUM "$1" ;;
    esac
    shift
  done
  if [[ -n $NUM && $NUM != all ]]; then
    NUM=${NUM#"${NUM%%[!0]*}"}                          # 007 is 7
    [[ -n $NUM ]] || fail "NUM is the number of processes: at least 1"
  fi
  [[ -z $PRINT_ONLY ]] || export PYTHONDONTWRITEBYTECODE=1
}

# take_data WORD: sets DATA, where that is a file or folder.
take_data() {
  [[ -n $1 ]] || fail "DATA is empty." "$EXPECTED"
  [[ -e $1 ]] || fail "$1: no such file or folder, and no number of processes." "$EXPECTED"
  set_once DATA "$1"
}

set_once() {
  [[ -z ${!1} ]] || fail "$1 is given twice: ${!1} and $2. Flags for the training script stand after --"
  printf -v "$1" %s "$2"
}

# has_flag NAME…: whether one of them is among FLAGS or in the file of --config, in either spelling. Sets VALUE to what follows it.
has_flag() {
  local flag given name previous='' found=1
  for flag in ${CONFIG[@]+"${CONFIG[@]}"} ${FLAGS[@]+"${FLAGS[@]}"}; do
    [[ -z $previous ]] || VALUE=$flag
    previous=''
    given=${flag%%=*}
    for name in "$@"; do
      [[ $flag == --* && ${given//_/-} == "$name" ]] || continue
      found=0 VALUE=''
      if [[ $flag == *=* ]]; then VALUE=${flag#*=}; else previous=$flag; fi
    done
  done
  return $found
}

# Sets CONFIG to what the file of --config holds, as flags, without what the script leaves out of an args.json; what is wrong
# with the file the script says. Needs no torch: histocc is taken as a bare folder.
read_config() {
  has_flag --config || return 0
  local flag was_read=''
  while IFS= read -r -d '' flag; do
    if [[ -z $flag ]]; then was_read=1; else CONFIG+=("$flag"); fi
  done < <([[ -z $ANY_PYTHON ]] || "$ANY_PYTHON" - "$VALUE" "$REPO/histocc" 2>/dev/null <<'EOF'
import json, os, sys, types
sys.modules["histocc"] = types.ModuleType("histocc")
sys.modules["histocc"].__path__ = [sys.argv[2]]
import tomllib
from histocc.runtime.config_file import OF_ONE_START
is_args = sys.argv[1].endswith(".json")
found = {}
try:
    if os.path.isfile(sys.argv[1]):
        with open(sys.argv[1], "rb") as file:
            found = json.load(file) if is_args else tomllib.load(file)
except (OSError, ValueError, RecursionError):
    pass
for name, value in found.items() if isinstance(found, dict) else ():
    if value not in (None, False) and not (is_args and name in OF_ONE_START):
        sys.stdout.buffer.write(f"--{name}={value}".replace("\0", " ").encode("utf-8", "replace") + b"\0")
sys.stdout.buffer.write(b"\0")
EOF
  )
  [[ -n $was_read ]] || say "Config:      $VALUE is not read here: what it says does not count in the lines below"
}

# ---- processes ----

# GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves.
count_gpus() {
  local listed all visible=0 id ids=()
  listed=$(nvidia-smi --list-gpus 2>/dev/null || true)
  all=$(grep -c '^GPU ' <<<"$listed" || true)
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    echo "$all"
    return
  fi
  IFS=', ' read -r -a ids <<<"$CUDA_VISIBLE_DEVICES" || true
  for id in ${ids[@]+"${ids[@]}"}; do                 # as CUDA reads it: up to the first that is not there
    case $id in
      GPU-* | MIG-*) ;;
      *[!0-9]* | ?????????*) break ;;
      *) ((10#$id < all)) || break ;;
    esac
    visible=$((visible + 1))
  done
  ((all == 0)) && echo 0 || echo "$visible"
}

# more_than NUMBER LIMIT: also for a NUMBER of more digits than the shell can count to.
more_than() {
  ((${#1} > 9)) || (($1 > $2))
}

# choose_processes DEFAULT (a number, or all): sets GPUS, PROCESSES and DEVICES, in words.
choose_processes() {
  local default=$1 hidden='' limit cores
  GPUS=$(count_gpus)
  [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || hidden=" (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)"
  if has_flag --device && [[ $VALUE == cpu ]]; then
    GPUS=0 hidden=' (--device cpu)'
  fi
  if ((GPUS == 0)); then
    PROCESSES=${NUM:-$default}
    [[ $PROCESSES != all ]] || PROCESSES=2
    cores=$(cores)
    limit=$((4 * cores > 8 ? 4 * cores : 8))
    ! more_than "$PROCESSES" "$limit" || fail "$PROCESSES processes are too many for the $cores core(s) of this machine." \
      "Ask for at most $limit: on CPUs NUM is limited to four for each core, or 8 where that is more"
    DEVICES="NO GPU$hidden: TRAINING ON CPUS, $PROCESSES process(es) on $cores core(s)"
    return
  fi
  PROCESSES=$NUM
  if [[ $PROCESSES == all || ( -z $NUM && $default == all ) ]]; then
    PROCESSES=$GPUS
  elif [[ -z $NUM ]]; then
    PROCESSES=$((default < GPUS ? default : GPUS))
  fi
  ! more_than "$PROCESSES" "$GPUS" || fail \
    "$PROCESSES processes need a GPU each, but $GPUS can be used here$hidden." \
    "Ask for at most $GPUS, set CUDA_VISIBLE_DEVICES to more of them, or train on CPUs with -- --device cpu"
  DEVICES="$PROCESSES of $GPUS GPU(s)$hidden"
  [[ $PROBED != *' none'* ]] || DEVICES+=$'\n'"             WARNING: torch ${PROBED%% *} was built without CUDA and trains on CPUs all the same"
}

# Those that this process may use; nproc would take OMP_NUM_THREADS for their number.
cores() {
  (unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc 2>/dev/null) || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1
}

# Without any Python, which --print-only can do without, the port that is usual.
free_port() {
  [[ -n $ANY_PYTHON ]] || { echo 29500; return; }
  "$ANY_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# ---- what to run ----

EXPECTED='DATA is a CSV file (*.csv, *.tsv or *.txt) or a Parquet file (*.parquet), or a folder with train.csv and val.csv (or .parquet)'

# data_are_missing USAGE: ends with 2.
data_are_missing() {
  fail "DATA is missing: $1 [-- FLAGS]" "A launcher takes the data from DATA alone; what FLAGS or a file of --config say of them does not count." "$EXPECTED"
}

# table_in_data NAME: its path in the folder DATA.
table_in_data() {
  local table=${DATA%/}/$1
  [[ -f $table.csv || -f $table.parquet ]] || fail "$DATA is a folder without $1.csv or $1.parquet." "$EXPECTED"
  [[ ! -f $table.csv || ! -f $table.parquet ]] || fail "$DATA holds both $1.csv and $1.parquet: leave one."
  if [[ -f $table.csv ]]; then echo "$table.csv"; else echo "$table.parquet"; fi
}

# Sets SCRIPT, ARGUMENTS and HEADER_OF, the file whose columns count, for DATA.
choose_script() {
  local validation
  if [[ -d $DATA ]]; then
    [[ -r $DATA && -x $DATA ]] || fail "$DATA may not be read by this user."
    HEADER_OF=$(table_in_data train) || exit 2
    validation=$(table_in_data val) || exit 2
    SCRIPT=train_mixer.py ARGUMENTS=(--train-data "$HEADER_OF" --val-data "$validation")
    return
  fi
  [[ -f $DATA ]] || fail "$DATA is no regular file: a table is read several times." "$EXPECTED"
  case $DATA in
    *.[cC][sS][vV] | *.[tT][sS][vV] | *.[tT][xX][tT] | *.[pP][aA][rR][qQ][uU][eE][tT]) ;;
    *) fail "$DATA is neither a table nor a folder of tables." "$EXPECTED" ;;
  esac
  [[ -r $DATA ]] || fail "$DATA may not be read by this user."
  HEADER_OF=$DATA
  SCRIPT=finetune.py ARGUMENTS=(--dataset "$DATA")
}

# Adds the flags that fit the columns of HEADER_OF, where the user has not given them.
describe_columns() {
  local found wanted=columns language=wanted
  ! has_flag --target-cols --key --target-col-naming || wanted=''
  ! has_flag --language --language-col || language=''
  [[ -n $wanted$language ]] || return 0
  if [[ -z $PROBED ]]; then
    say "Columns:     not read, since that needs torch: a start adds the flags that fit them, such as --target-cols"
    return
  fi
  found=$("$PYTHON" - "$HEADER_OF" ${wanted:+"$wanted"} <<'EOF'
import sys
from histocc.data import keys
from histocc.runtime.world import UserError
file, *wanted = sys.argv[1:]
try:
    print("lang" in tables.read_header(file)[0])
except UserError as error:
    sys.exit(print("error:", error, file=sys.stderr) or 2)
sys.exit(tables.main([file]) if wanted else 0)
EOF
  ) || exit $?
  if [[ $found == *--target-cols* ]]; then
    if has_flag --formatter; then
      found=${found/--formatter * --target-cols/--target-cols}
    fi
    # shellcheck disable=SC2206  # the columns that it finds have no blanks in their names
    ARGUMENTS+=(${found#*$'\n'})
  fi
  if [[ $found == True* && -n $language ]]; then
    ARGUMENTS+=(--language-col lang)
  fi
}

choose_save_path() {
  SAVE_PATH=./output
  if has_flag --save-path --save-dir --checkpoint-dir; then
    SAVE_PATH=$VALUE
    [[ -n $SAVE_PATH ]] || fail "--save-path is empty: expected a folder. Without the flag it is ./output"
    [[ $SAVE_PATH != -* ]] || SAVE_PATH=./$SAVE_PATH
  elif [[ $SCRIPT == finetune.py ]]; then
    ARGUMENTS+=(--save-path "$SAVE_PATH")
  else
    ARGUMENTS+=(--save-dir "$SAVE_PATH")
  fi
}

# Whether the save path holds the run on the sample that launch_training.sh makes, however that path was spelled.
holds_sample_run() {
  [[ -f $SAVE_PATH/args.json && -f $SAVE_PATH/sample/train.csv ]] && grep -q '"[^"]*/sample/train\.csv"' <"$SAVE_PATH/args.json"
}

# Sets NODES, ADDRESS and PORT: where the processes meet. On one machine a port that is in use is replaced by a free one;
# several machines must agree on theirs.
choose_meeting_point() {
  NODES=${NNODES:-1} ADDRESS=127.0.0.1 PORT=${MASTER_PORT:-}
  [[ $NODES =~ ^[1-9][0-9]{0,5}$ ]] || fail "NNODES=$NODES: set it to the number of machines, at least 1"
  [[ -z $PORT || $PORT =~ ^[1-9][0-9]{0,4}$ && $PORT -le 65535 ]] || fail "MASTER_PORT=$PORT: set it to a port, a whole number from 1 to 65535, or leave it out"
  [[ -z ${NODE_RANK:-} || $NODE_RANK =~ ^(0|[1-9][0-9]{0,5})$ && $NODE_RANK -lt $NODES ]] || fail \
    "NODE_RANK=$NODE_RANK, but NNODES=$NODES: set NNODES to the number of machines and NODE_RANK to that of this one, from 0 to NNODES - 1"
  if ((NODES > 1)); then
    [[ -n ${MASTER_ADDR:-} && -n ${NODE_RANK:-$NUMBERED_BY_SRUN} ]] || fail "NNODES=$NODES needs MASTER_ADDR, the first machine, and NODE_RANK, 0 on that machine and 1, 2, ... on the others." \
      "On each of them: NNODES=$NODES NODE_RANK=0 MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=29500 $0 ..."
    ADDRESS=$MASTER_ADDR PORT=${PORT:-29500}
  elif [[ -z $PORT ]]; then
    PORT=$(free_port)
  elif port_in_use "$PORT"; then
    say "Port $PORT (MASTER_PORT) is in use: another one is taken"
    PORT=$(free_port)
  fi
}

port_in_use() {
  [[ -n $ANY_PYTHON ]] && ! "$ANY_PYTHON" - "$1" 2>/dev/null <<'EOF'
import socket, sys
held = socket.socket()
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.bind(("", int(sys.argv[1])))
EOF
}

# Sets OMP_NUM_THREADS, which may be a list, one number for each level of nested parallelism.
choose_threads() {
  local most=1024
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(cores) / PROCESSES > 0 ? $(cores) / PROCESSES : 1))}
  if [[ ! $OMP_NUM_THREADS =~ ^[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*$ ]] || ((${OMP_NUM_THREADS%%,*} > most)); then
    fail "OMP_NUM_THREADS=$OMP_NUM_THREADS: set it to the threads of a process, from 1 to $most, or leave it out"
  fi
}

# Whether this shell and what it starts were told to live on after a hang-up, as by nohup.
hangup_is_ignored() {
  [[ $("$BASH" -c 'kill -HUP $$; echo alive' 2>/dev/null) == alive ]]
}

# Sets COMMAND from all that was chosen; the user's flags come last and win.
make_command() {
  local signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1
  choose_meeting_point
  choose_threads
  COMMAND=("$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$PROCESSES" --master-addr="$ADDRESS" --master-port="$PORT")
  [[ -z ${NODE_RANK:-} ]] || COMMAND+=(--node-rank="$NODE_RANK")
  if [[ -z $PROBED || $PROBED == *--signals-to-handle* ]]; then
    hangup_is_ignored || signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    COMMAND+=(--signals-to-handle="$signals")         # torchrun would take a signal that is ignored, too
  fi
  [[ -n $PROBED && $PROBED != *--shutdown-timeout* ]] || COMMAND+=(--shutdown-timeout=120)
  COMMAND+=("$(script_path)" --distributed "${ARGUMENTS[@]}")
  if [[ -n ${MODEL_SIZE:-} ]] && ! has_flag --model-size; then
    COMMAND+=(--model-size "$MODEL_SIZE")
  fi
  COMMAND+=(${FLAGS[@]+"${FLAGS[@]}"})
}

# The training script; SCRIPT in the environment, a path, takes its place.
script_path() {
  [[ -z $OWN_SCRIPT ]] && echo "$REPO/$SCRIPT" || echo "$OWN_SCRIPT"
}

say_command() {
  local machines=''
  ((NODES == 1)) || machines=" on each of $NODES machines"
  say "Data:        $DATA" "Script:      ${OWN_SCRIPT:-$SCRIPT}" "Processes:   $PROCESSES$machines" "Devices:     $DEVICES" \
    "Threads:     OMP_NUM_THREADS=$OMP_NUM_THREADS" "Port:        $PORT" "Rate:        $(learning_rate)" \
    "Save path:   $SAVE_PATH" "Command:"
  say_words "${COMMAND[@]}"
}

# How the learning rate comes about, in words.
learning_rate() {
  local rate='the learning rate of the script' scaling=none
  ! has_flag --learning-rate || rate="learning rate $VALUE"
  [[ " ${ARGUMENTS[*]} " != *' --lr-scaling linear '* ]] || scaling=linear
  ! has_flag --lr-scaling || scaling=$VALUE
  case $scaling in
    linear) echo "$rate x $((PROCESSES * NODES)) processes (--lr-scaling linear)" ;;
    sqrt) echo "$rate x square root of $((PROCESSES * NODES)) processes (--lr-scaling sqrt)" ;;
    *) echo "$rate, whatever the number of processes" ;;
  esac
}

# Says what will run on the user's data, then becomes it.
start() {
  if ! has_flag --save-path --save-dir --checkpoint-dir --overwrite && holds_sample_run; then
    fail "$SAVE_PATH holds the run on the sample." \
      "Choose another folder with -- --save-path DIR, or replace that run with -- --overwrite"
  fi
  make_command
  say_command
  [[ -z $PRINT_ONLY ]] || exit 0
  exec "${COMMAND[@]}"
}

# run_and_return COMMAND…: runs it, passing signals on to it, for what follows it.
run_and_return() {
  local child='' status=0 signal early=''             # a signal that comes before the child's number is known waits for it
  for signal in TERM INT HUP QUIT USR1; do
    # shellcheck disable=SC2064  # the signal, now
    trap "early=$signal; [[ -z \$child ]] || kill -$signal \"\$child\" 2>/dev/null || true" "$signal"
  done
  (trap - INT QUIT; exec "$@") &                      # bash would have a background process ignore both
  child=$!
  [[ -z $early ]] || kill "-$early" "$child" 2>/dev/null || true
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?                        # a signal ends `wait` early
  done
  trap - TERM INT HUP QUIT USR1
  return "$status"
}
