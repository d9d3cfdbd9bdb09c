# shellcheck shell=bash
# The Python environment of the launchers and of tests/run. Sourced by common.sh, which has REPO, say and fail.

VENV=$REPO/.venv
CAN_MAKE_VENV='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

# find_python PROGRAM [PYTHON…]: the path of the first Python that can run the program; those named are tried last.
find_python() {
  local name program=$1
  for name in python3.11 python3.12 python3.13 python3.14 python3 python "${@:2}"; do
    ! "$name" -c "$program" >/dev/null 2>&1 || { command -v "$name"; return; }
  done
  return 1
}

# probe PYTHON [MODULE…]: whether it can train and finds the modules. Sets PROBED: "torch version, CUDA version or
# none, number of GPUs that it can use, options of its torchrun" and below it why it can use none, or why it cannot train.
# --numa-binding is among the options if there are several nodes of memory and torchrun can bind to that of every GPU:
# else it would end the job.
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
built, usable = torch.version.cuda or torch.version.hip, torch.cuda.is_available()
gpus, wanted = torch.cuda.device_count() if usable else 0, ["--signals-to-handle", "--shutdown-timeout"]
try:
    from torch.numa.binding import AffinityMode, NumaOptions, _get_validated_logical_cpus_to_bind_to as cpus_of
    if not open("/sys/devices/system/node/has_memory").read().strip().isdigit():  # such as 0-1 or 0,2
        options = NumaOptions(affinity_mode=AffinityMode.NODE)
        wanted += ["--numa-binding"] * all([cpus_of(gpu_index=i, numa_options=options) for i in range(gpus)])
except Exception:
    pass
print(torch.__version__, built or "none", gpus, *(option for option in wanted if option in usage))
try:
    built and not usable and torch.cuda.init()
except RuntimeError as error:
    print(str(error).splitlines()[0])
EOF
  ) && [[ -n $PROBED ]]
}

# set_up REQUIREMENTS [MODULE…]: sets PYTHON to that of the active environment where it has torch, numpy and the
# modules, else to that of .venv, which is made and filled here. With PRINT_ONLY nothing is made: where no
# environment has torch, PROBED is empty.
set_up() {
  local name active reason=''
  for name in python python3; do
    active=$(command -v "$name" || true)
    [[ -n $active && $active != "$VENV/bin/"* ]] || continue
    PYTHON=$active
    ! probe "$PYTHON" "${@:2}" || { say "Environment: $PYTHON, torch ${PROBED%% *}"; return; }
    reason=${reason:-" ($active is not used: ${PROBED:-it does not start})"}
  done
  PYTHON=$VENV/bin/python
  say "Environment: $VENV$reason"
  venv_is_ready "$@" || if [[ -n $PRINT_ONLY ]]; then plan_venv "$@"; else fill_venv "$@"; fi
}

# The file `unfinished` stands in .venv while it is being filled, so that an interrupted start is noticed and mended;
# `installed-REQUIREMENTS` says for which requirements it was filled, so that the next start costs nothing.
venv_is_ready() {
  [[ ! -e $VENV/unfinished ]] || return 1
  [[ ! -e $VENV/installed-$1 || $(cat "$VENV/installed-$1") == "$(wanted_in_venv "$1")" ]] && probe "$PYTHON" "${@:2}"
}

wanted_in_venv() {
  cat "$REPO/requirements.txt" "$REPO/$1" | cksum
}

# Whether .venv is to be made from nothing.
venv_is_broken() {
  [[ -e $VENV/unfinished ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1
}

fill_venv() {
  local log=$VENV/pip.log
  ! venv_is_broken || make_venv "$log" "${@:2}"
  touch "$VENV/unfinished"
  say "  installing $1 (torch alone is a download of 200 MB to 3 GB; log: $log)"
  "$PYTHON" -m pip install --no-input --disable-pip-version-check -r "$REPO/$1" >"$log" 2>&1 </dev/null || pip_failed "$log"
  "$PYTHON" -m pip install --no-input --disable-pip-version-check --no-deps -e "$REPO" >>"$log" 2>&1 </dev/null ||
    say "  the program histocc could not be installed: $log says why. In this folder, python -m histocc is the same"
  probe "$PYTHON" "${@:2}" || fail "$VENV was filled, but: $PROBED"
  wanted_in_venv "$1" >"$VENV/installed-$1"
  rm "$VENV/unfinished"
  say "  installed"
}

# make_venv LOG [MODULE…]: an empty .venv, in the place of one that was made here; the user's own is left alone.
make_venv() {
  local base
  base=$(find_python "$CAN_MAKE_VENV") || fail "Python 3.11 or newer, with its venv module, was not found." \
    "Install it (on Debian and Ubuntu: python3.11 and python3.11-venv), or activate an environment with torch 2.10 or newer."
  if [[ -e $VENV || -L $VENV ]]; then
    [[ -e $VENV/unfinished || -e $1 ]] || { probe "$PYTHON" "${@:2}" || true; fail \
      "$VENV was not made by this program and cannot be used: ${PROBED:-its python does not start}" \
      "Remove or repair it, or activate an environment with torch 2.10 or newer."; }
    say "  making it again: it is broken, or an earlier start was interrupted"
  fi
  say "  making it with $("$base" --version)"
  rm -rf "$VENV"
  mkdir "$VENV" || fail "$VENV cannot be made. Activate an environment with torch 2.10 or newer instead."
  touch "$VENV/unfinished"
  "$base" -m venv "$VENV" >"$1" 2>&1 || pip_failed "$1"
}

# Says what fill_venv would do.
plan_venv() {
  local base='' deed='bring it up to date' wanted
  if probe "$PYTHON" "${@:2}" && ! venv_is_broken; then
    say "  --print-only installs nothing; a start would bring it up to date with $1"
    return
  fi
  PROBED=''
  base=$(find_python "$CAN_MAKE_VENV") || true
  ! venv_is_broken || deed="make it with ${base:-Python 3.11 or newer (not found here: install it first)}"
  wanted=$(cat "$REPO/$1")
  say "  --print-only installs nothing; a start would $deed and install $1: ${wanted//$'\n'/, }" \
    "  Not known before that: whether torch can use the devices"
}

pip_failed() {
  tail -n 25 "$1" >&2 || true
  (fail "the installation failed; the lines above are the end of $1" \
    "The same command tries again. An activated environment with torch 2.10 or newer is used instead of .venv.") || exit 1
}
