# shellcheck shell=bash
# What the launchers and tests/run have in common. Sourced, never run. Written for bash 3.2 too.

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

# fail LINE…: says what is wrong and ends with 2, as the scripts do for a user's mistake.
fail() {
  (printf 'error: %s\n' "$1" && shift && { (($# == 0)) || printf '  %s\n' "$@"; }) >&2 || true
  exit 2
}

# shellcheck source=scripts/environment.sh
source "$REPO/scripts/environment.sh"

# launch NAME ARGUMENT…: checks the arguments, makes the environment, and becomes the program histocc/launch, which
# decides everything else. Any Python can run that; without one the command is printed as far as it is known.
launch() {
  local name=$1 word help='' python=''
  shift
  PRINT_ONLY=${HISTOCC_LAUNCH_DRY_RUN:-}
  [[ $PRINT_ONLY != 0 ]] || PRINT_ONLY=''
  for word in "$@"; do
    case $word in
      --) break ;;
      --print-only) PRINT_ONLY=1 ;;
      -h | --help) help=1 ;;
    esac
  done
  [[ -z $PRINT_ONLY ]] || export PYTHONDONTWRITEBYTECODE=1
  if python=$(find_python 'import sys; sys.exit(sys.version_info < (3, 8))' "$VENV/bin/python"); then
    "$python" "$REPO/histocc/launch" "$name" --check --started-as="$0" -- "$@" || exit
  elif [[ -n $help ]]; then
    say "$(cat "$REPO/histocc/launch/$name.txt")"
  fi
  [[ -z $help ]] || exit 0
  set_up requirements.txt
  [[ -z $PROBED ]] || python=$PYTHON
  [[ -n $python ]] || { print_without_python "$@"; exit 0; }
  exec "$python" "$REPO/histocc/launch" "$name" --started-as="$0" --python="$PYTHON" --torch="$PROBED" \
    --seconds="$SECONDS" ${PRINT_ONLY:+--print-only} -- "$@"
}

# For --print-only on a machine without any Python.
print_without_python() {
  local word previous=''
  while (($#)) && [[ $1 != -- ]]; do shift; done
  for word in "${@:2}"; do
    [[ $previous != --config ]] || say "Config:      $word is not read here: what it says does not count in the lines below"
    previous=$word
  done
  say "Command, where NUM and DATA stand for what Python makes of yours:" \
    "$(printf ' %q' "$PYTHON" -m torch.distributed.run --nnodes="${NNODES:-1}" --nproc-per-node=NUM \
      --master-port="${MASTER_PORT:-29500}" "$REPO/finetune.py" --distributed --dataset DATA "${@:2}")"
}
