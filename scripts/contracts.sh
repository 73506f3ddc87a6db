#!/usr/bin/env bash
# Checks this package's contracts with Megatron-Core on another version of it than the one in .venv:
#
#   ./scripts/contracts.sh 0.19.0            a version of the package index
#   ./scripts/contracts.sh ../Megatron-LM    a source tree; it is copied first and stays as it is
#   ./scripts/contracts.sh                   the version in .venv
#
# All other packages come from .venv. Further arguments go to contracts.py. The exit code is 1 if a contract is broken.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
check=("$scripts/../.venv/bin/python" "$scripts/contracts.py")
export OMP_NUM_THREADS=1

wanted=${1-}
if [ -n "$wanted" ] && [ "${wanted:0:1}" != - ]; then
    shift
    [ -d "$wanted" ] || wanted="megatron-core==$wanted"
    exec "$scripts/with.sh" "$wanted" "${check[@]}" "$@"
fi
"$scripts/setup.sh"
"${check[@]}" "$@"
