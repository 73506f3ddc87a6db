#!/usr/bin/env bash
# Checks this package's contracts with Megatron-Core on another version of it than the one in .venv:
#
#   ./scripts/contracts.sh 0.19.0            a version of the package index
#   ./scripts/contracts.sh ../Megatron-LM    a source tree; it is copied first and stays as it is
#   ./scripts/contracts.sh                   the version in .venv
#
# All other packages come from .venv. Further arguments go to contracts.py. The exit code is 1 if a contract is broken.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh

wanted=${1-}
if [ -n "$wanted" ] && [ "${wanted:0:1}" != - ]; then
    shift
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    if tree=$(cd "$here" && realpath -e "$wanted" 2>/dev/null) && [ -d "$tree" ]; then
        mkdir "$folder/tree"
        tar -C "$tree" --exclude=.git --exclude=tests --exclude=docs -c . | tar -C "$folder/tree" -x
        what=$folder/tree
    else
        what="megatron-core==$wanted"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/packages" "$what"
    export PYTHONPATH="$folder/packages${PYTHONPATH:+:$PYTHONPATH}"
fi
OMP_NUM_THREADS=1 .venv/bin/python scripts/contracts.py "$@"
