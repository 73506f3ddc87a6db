#!/usr/bin/env bash
# Runs a command with other versions of packages than those in .venv, which stays as it is:
#
#   ./scripts/with.sh torch==2.15.0 ./scripts/test.sh --quick
#   ./scripts/with.sh megatron-core==0.19.0 .venv/bin/python scripts/contracts.py
#   ./scripts/with.sh ../Megatron-LM ./scripts/test.sh tests/mcore    a source tree; it is copied first
#
# Megatron-Core comes without the packages that it needs, which are in .venv. The path of a tree is relative to the
# caller's folder, the command runs in the repository's.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh

wanted=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
alone=--no-deps
if tree=$(cd "$here" && realpath -e "$wanted" 2>/dev/null) && [ -d "$tree" ]; then
    mkdir "$folder/tree"
    tar -C "$tree" --exclude=.git --exclude=tests --exclude=docs -c . | tar -C "$folder/tree" -x
    wanted=$folder/tree
elif [[ $wanted != megatron-core* ]]; then
    alone=
fi
# shellcheck disable=SC2086 # no argument if empty
.venv/bin/python -m pip install --quiet --disable-pip-version-check $alone --target "$folder/packages" "$wanted"
PYTHONPATH="$folder/packages${PYTHONPATH:+:$PYTHONPATH}" "$@"
