# shellcheck shell=bash
# What launch_training.sh, run_multi_gpu_train.sh and tests/run have in common. Sourced, never run.
# Written for bash 3.2 too: an empty array is expanded as ${A[@]+"${A[@]}"}.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# fail LINE…: says what is wrong and ends with 2, as the scripts do for a user's mistake.
fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit 2
}

# ---- environment ----

# probe PYTHON [MODULE…]: whether it can train and finds the modules. Sets PROBED: "torch version, CUDA version or none,
# options of its torchrun", or why not.
probe() {
  PROBED=$("$1" - "${@:2}" 2>/dev/null <<'EOF'
import importlib.util, re, sys
if sys.version_info < (3, 11):
    sys.exit(print("Python %d.%d is older than 3.11" % sys.version_info[:2]) or 1)
missing = [name for name in ("torch", "numpy", *sys.argv[1:]) if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(print("it has no", ", ".join(missing)) or 1)
try:
    import numpy, torch
    from torch.distributed.run import get_args_parser
except Exception as error:
    sys.exit(print("torch or numpy cannot be imported:", " ".join(str(error).split())) or 1)
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
    sys.exit(print("torch", torch.__version__, "is older than 2.10") or 1)
usage = get_args_parser().format_help()
print(torch.__version__, torch.version.cuda or torch.version.hip or "none",
      *(option for option in ("--signals-to-handle", "--shutdown-timeout") if option in usage))
EOF
  ) && [[ -n $PROBED ]]
}

# set_up REQUIREMENTS [MODULE…]: sets PYTHON to that of the active environment where it has torch, numpy and the modules,
# else to that of .venv, which is made and filled here.
set_up() {
  local name active reason=''
  for name in python python3; do
    active=$(command -v "$name" || true)
    [[ -n $active && $active != "$REPO/.venv/bin/"* ]] || continue
    if probe "$active" "${@:2}"; then
      PYTHON=$active
      echo "Environment: $PYTHON, torch ${PROBED%% *}"
      return
    fi
    reason=${reason:-" ($active is not used: ${PROBED:-it does not start})"}
  done
  PYTHON=$REPO/.venv/bin/python
  echo "Environment: $REPO/.venv$reason"
  fill_venv "$@"
}

# The file `unfinished` stands in .venv while it is being filled, so that an interrupted start is noticed and mended;
# `installed-REQUIREMENTS` says for which requirements it was filled, so that the next start costs nothing.
fill_venv() {
  local venv=$REPO/.venv unfinished=$REPO/.venv/unfinished done_for=$REPO/.venv/installed-$1 log=$REPO/.venv/pip.log wanted base
  wanted=$(cat "$REPO/requirements.txt" "$REPO/$1" | cksum)
  if [[ ! -e $unfinished && ( ! -e $done_for || $(cat "$done_for") == "$wanted" ) ]] && probe "$PYTHON" "${@:2}"; then
    return
  fi
  if [[ -e $unfinished ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    [[ ! -e $venv ]] || echo "  making it anew: it is broken, or an earlier start was interrupted"
    echo "  making it with $("$base" --version)"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$unfinished"
    "$base" -m venv "$venv" >"$log" 2>&1 || pip_failed "$log"
  fi
  touch "$unfinished"
  echo "  installing $1 (torch alone is a download of 200 MB to 3 GB; log: $log)"
  "$PYTHON" -m pip install --no-input --disable-pip-version-check -r "$REPO/$1" >"$log" 2>&1 </dev/null || pip_failed "$log"
  probe "$PYTHON" "${@:2}" || fail "$venv was filled, but: $PROBED"
  echo "$wanted" >"$done_for"
  rm "$unfinished"
  echo "  installed"
}

pip_failed() {
  tail -n 25 "$1" >&2
  (fail "the installation failed; the lines above are the end of $1" \
    "The same command tries again. An activated environment with torch 2.10 or newer is used instead of .venv.") || exit 1
}

find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer, with its venv module, was not found." \
    "Install it (on Debian and Ubuntu: python3.11 and python3.11-venv), or activate an environment with torch 2.10 or newer."
}

# ---- arguments of the launchers ----

# The part of --help that both launchers have.
usage_of_both() {
  cat <<'EOF'
  --print-only  print what would run and stop (so does HISTOCC_LAUNCH_DRY_RUN=1);
                the environment is set up if it is not yet there
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
  export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}  # started from another folder, python finds histocc all the same
  NUM='' DATA='' FLAGS=() CONFIG=() PRINT_ONLY=${HISTOCC_LAUNCH_DRY_RUN:-} NUMBERED_BY_SRUN=''
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --print-only) PRINT_ONLY=1 ;;
      --) shift; FLAGS=("$@"); break ;;
      -*) fail "unknown option $1. Flags for the training script stand after --: [NUM] [DATA] -- $1" ;;
      *[!0-9]* | '')
        if [[ $1 == all ]]; then
          set_once NUM "$1"
        else
          [[ -n $1 ]] || fail "DATA is empty: expected a CSV or Parquet file, or a folder with train.csv and val.csv (or .parquet)"
          set_once DATA "$1"
        fi ;;
      *) set_once NUM "$((10#$1))" ;;
    esac
    shift
  done
  [[ $NUM != 0 ]] || fail "NUM is the number of processes: at least 1"
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
# with the file the script says.
read_config() {
  has_flag --config || return 0
  local line
  while IFS= read -r line; do CONFIG+=("$line"); done < <("$PYTHON" - "$VALUE" <<'EOF'
import json, sys, tomllib
from histocc.config_file import OF_ONE_START
is_args = sys.argv[1].endswith(".json")
try:
    with open(sys.argv[1], "rb") as file:
        found = json.load(file) if is_args else tomllib.load(file)
except (OSError, ValueError):
    found = {}
for name, value in found.items():
    if value not in (None, False) and not (is_args and name in OF_ONE_START):
        print(f"--{name}={value}")
EOF
  )
}

# ---- processes ----

# GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves.
count_gpus() {
  local listed all visible=0 id
  listed=$(nvidia-smi --list-gpus 2>/dev/null || true)
  all=$(grep -c '^GPU ' <<<"$listed" || true)
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    echo "$all"
    return
  fi
  for id in ${CUDA_VISIBLE_DEVICES//,/ }; do          # as CUDA reads it: up to the first that is not there
    [[ ! $id =~ ^-?[0-9]+$ ]] || ((id >= 0 && id < all)) || break
    visible=$((visible + 1))
  done
  ((all == 0)) && echo 0 || echo "$visible"
}

# choose_processes DEFAULT (a number, or all): sets GPUS, PROCESSES and DEVICES, in words.
choose_processes() {
  local default=$1 hidden=''
  GPUS=$(count_gpus)
  [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || hidden=" (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES)"
  if has_flag --device && [[ $VALUE == cpu ]]; then
    GPUS=0 hidden=' (--device cpu)'
  fi
  if ((GPUS == 0)); then
    PROCESSES=${NUM:-$default}
    [[ $PROCESSES != all ]] || PROCESSES=2
    DEVICES="NO GPU$hidden: TRAINING ON CPUS, $PROCESSES process(es) on $(cores) core(s)"
    return
  fi
  PROCESSES=$NUM
  if [[ $PROCESSES == all || ( -z $NUM && $default == all ) ]]; then
    PROCESSES=$GPUS
  elif [[ -z $NUM ]]; then
    PROCESSES=$((default < GPUS ? default : GPUS))
  fi
  ((PROCESSES <= GPUS)) || fail \
    "$PROCESSES processes need a GPU each, but $GPUS can be used here$hidden." \
    "Ask for at most $GPUS, set CUDA_VISIBLE_DEVICES to more of them, or train on CPUs with -- --device cpu"
  DEVICES="$PROCESSES of $GPUS GPU(s)$hidden"
  [[ $PROBED != *' none'* ]] || DEVICES+=$'\n'"             WARNING: torch ${PROBED%% *} was built without CUDA and trains on CPUs all the same"
}

# Those that this process may use; nproc would take OMP_NUM_THREADS for their number.
cores() {
  (unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc 2>/dev/null) || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1
}

free_port() {
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
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
    HEADER_OF=$(table_in_data train) || exit 2
    validation=$(table_in_data val) || exit 2
    SCRIPT=train_mixer.py ARGUMENTS=(--train-data "$HEADER_OF" --val-data "$validation")
    return
  fi
  [[ -e $DATA ]] || fail "$DATA: no such file or folder." "$EXPECTED"
  case $DATA in
    *.[cC][sS][vV] | *.[tT][sS][vV] | *.[tT][xX][tT] | *.[pP][aA][rR][qQ][uU][eE][tT]) ;;
    *) fail "$DATA is neither a table nor a folder of tables." "$EXPECTED" ;;
  esac
  HEADER_OF=$DATA
  SCRIPT=finetune.py ARGUMENTS=(--dataset "$DATA")
}

# Adds the flags that fit the columns of HEADER_OF, where the user has not given them.
describe_columns() {
  local found wanted=columns language=wanted
  ! has_flag --target-cols --key --target-col-naming || wanted=''
  ! has_flag --language --language-col || language=''
  [[ -n $wanted$language ]] || return 0
  found=$("$PYTHON" - "$HEADER_OF" ${wanted:+"$wanted"} <<'EOF'
import sys
from histocc import tables
from histocc.distributed import UserError
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
  elif [[ $SCRIPT == finetune.py ]]; then
    ARGUMENTS+=(--save-path "$SAVE_PATH")
  else
    ARGUMENTS+=(--save-dir "$SAVE_PATH")
  fi
}

# Whether the save path holds the run on the sample that launch_training.sh makes.
holds_sample_run() {
  [[ -f $SAVE_PATH/args.json ]] && grep -qF "\"$SAVE_PATH/sample/train.csv\"" "$SAVE_PATH/args.json"
}

# Sets NODES, ADDRESS and PORT: where the processes meet. On one machine a port that is in use is replaced by a free one;
# several machines must agree on theirs.
choose_meeting_point() {
  NODES=${NNODES:-1} ADDRESS=${MASTER_ADDR:-127.0.0.1} PORT=${MASTER_PORT:-}
  [[ $NODES =~ ^[1-9][0-9]{0,5}$ ]] || fail "NNODES=$NODES: set it to the number of machines, at least 1"
  [[ -z $PORT || $PORT =~ ^[1-9][0-9]{0,4}$ && $PORT -le 65535 ]] || fail "MASTER_PORT=$PORT: set it to a port, a whole number from 1 to 65535, or leave it out"
  [[ -z ${NODE_RANK:-} || $NODE_RANK =~ ^(0|[1-9][0-9]{0,5})$ && $NODE_RANK -lt $NODES ]] || fail \
    "NODE_RANK=$NODE_RANK, but NNODES=$NODES: set NNODES to the number of machines and NODE_RANK to that of this one, from 0 to NNODES - 1"
  if ((NODES > 1)); then
    [[ -n ${MASTER_ADDR:-} && -n ${NODE_RANK:-$NUMBERED_BY_SRUN} ]] || fail "NNODES=$NODES needs MASTER_ADDR, the first machine, and NODE_RANK, 0 on that machine and 1, 2, ... on the others." \
      "On each of them: NNODES=$NODES NODE_RANK=0 MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=29500 $0 ..."
    PORT=${PORT:-29500}
  elif [[ -z $PORT ]]; then
    PORT=$(free_port)
  elif port_in_use "$PORT"; then
    echo "Port $PORT (MASTER_PORT) is in use: another one is taken"
    PORT=$(free_port)
  fi
}

port_in_use() {
  ! "$PYTHON" -c 'import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("", int(sys.argv[1])))' "$1" 2>/dev/null
}

# Sets COMMAND from all that was chosen; the user's flags come last and win.
make_command() {
  choose_meeting_point
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(cores) / PROCESSES > 0 ? $(cores) / PROCESSES : 1))}
  COMMAND=("$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$PROCESSES" --master-addr="$ADDRESS" --master-port="$PORT")
  [[ -z ${NODE_RANK:-} ]] || COMMAND+=(--node-rank="$NODE_RANK")
  [[ $PROBED != *--signals-to-handle* ]] || COMMAND+=(--signals-to-handle='SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1')
  [[ $PROBED != *--shutdown-timeout* ]] || COMMAND+=(--shutdown-timeout=120)
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
  printf '%s\n' "Data:        $DATA" "Script:      ${OWN_SCRIPT:-$SCRIPT}" "Processes:   $PROCESSES$( ((NODES == 1)) || echo " on each of $NODES machines")" "Devices:     $DEVICES" \
    "Threads:     OMP_NUM_THREADS=$OMP_NUM_THREADS" "Port:        $PORT" "Rate:        $(learning_rate)" "Save path:   $SAVE_PATH" "Command:"
  printf ' %q' "${COMMAND[@]}"
  printf '\n'
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
