#!/usr/bin/env bash
# scripts/train_multi_gpu.sh [CONFIG] [NUM] [-- FLAGS]: trains what the file CONFIG names (configs/scenes.toml if it
# is left out) on NUM processes, all GPUs by default. Everything else is that of launch_training.sh.
set -euo pipefail
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
export SCRIPT="${SCRIPT:-$HERE/examples/train_from_config.py}"
[[ ! ${1:-all} =~ ^([0-9]+$|all$|-) ]] || set -- "$HERE/configs/scenes.toml" "$@"
if [[ ! ${2:-} =~ ^([0-9]+|all)$ ]]; then
  set -- "$1" all "${@:2}"
fi
exec "$HERE/launch_training.sh" "$@"
