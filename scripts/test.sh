#!/usr/bin/env bash
# Runs the tests in one of three lanes:
#   ./scripts/test.sh             every kind of test, on cases that cover what can differ: before each commit
#   ./scripts/test.sh --quick     something of every package (tests/quick.txt), while you work
#   ./scripts/test.sh --nightly   what the full lane leaves out (marker "nightly"): whole sweeps, further versions, a browser
# Other arguments go to pytest, for example: ./scripts/test.sh tests/schedule -k v-half
# Every run ends with its longest tests. On Debian, root's tests install what pip cannot bring: Slurm, Chromium
# (tests/machine/debian.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
# Hundreds of processes import the package; where Python is told to keep no bytecode, each would compile it anew.
unset PYTHONDONTWRITEBYTECODE
cores=$(getconf _NPROCESSORS_ONLN)
# More workers than cores: tests that start ranks have three of them (tests/conftest.py), and wait now and then.
workers=$((cores + 3))
case ${1-} in
    --quick)
        shift
        mapfile -t chosen < <(grep -v -e '^#' -e '^$' tests/quick.txt)
        workers=$((cores + 1)) # to start one takes longer here than most of its tests
        set -- "${chosen[@]}" "$@"
        ;;
    --nightly)
        shift
        set -- -m nightly "$@"
        ;;
    ?*) exec .venv/bin/python -m pytest "$@" ;;
esac
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n "$workers" --durations=20 "$@"
