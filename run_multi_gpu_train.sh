#!/usr/bin/env bash
if [ -z "${BASH_VERSION:-}" ]; then  # started with another shell: sh run_multi_gpu_train.sh
  command -v bash >/dev/null || { echo "error: $0 needs bash, which was not found: install it" >&2; exit 2; }
  exec bash -- "$0" "$@"
fi
set +o posix -euo pipefail           # where sh is bash, it is so in its POSIX mode
HERE=${BASH_SOURCE[0]}
while [[ -L $HERE ]]; do             # started through a link
  LINK=$(readlink -- "$HERE")
  [[ $LINK == /* ]] || LINK=$(dirname -- "$HERE")/$LINK
  HERE=$LINK
done
HERE=$(dirname -- "$HERE")
if [[ ! -f $HERE/scripts/common.sh ]]; then
  echo "error: $HERE is not the folder of histocc: start this script there, or through a link" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source "$HERE/scripts/common.sh"
launch run_multi_gpu_train "$@"
