#!/usr/bin/env bash
# scripts/train_multi_gpu.sh CONFIG [NUM] [-- FLAGS]: trains what the file CONFIG names (configs/scenes.toml) on NUM
# processes, all GPUs by default. Everything else is that of launch_training.sh.
set -euo pipefail
HERE=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export SCRIPT="${SCRIPT:-$HERE/examples/train_from_config.py}"
case ${1:-} in
  '' | -*) (echo "error: CONFIG is missing: $0 CONFIG [NUM] [-- FLAGS], for example configs/scenes.toml" >&2) || true; exit 2 ;;
esac
if [[ ! ${2:-} =~ ^([0-9]+|all)$ ]]; then
  set -- "$1" all "${@:2}"
fi
exec "$HERE/launch_training.sh" "$@"
