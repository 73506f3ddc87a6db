#!/usr/bin/env bash
# Runs the whole test suite, or with --quick a part that has something of every package (tests/quick.txt).
# Other arguments go to pytest, for example: ./scripts/test.sh tests/schedule -k v-half
# On Debian, root's tests install what pip cannot bring: Slurm, Chromium (tests/machine/debian.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
# Hundreds of processes import the package; where Python is told to keep no bytecode, each would compile it anew.
unset PYTHONDONTWRITEBYTECODE
if [ "${1-}" = --quick ]; then
    shift
    mapfile -t chosen < <(grep -v -e '^#' -e '^$' tests/quick.txt)
    set -- "${chosen[@]}" "$@"
elif [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# More workers than cores: tests that start ranks have three of them (tests/conftest.py), and wait now and then.
workers=$(($(getconf _NPROCESSORS_ONLN) + 3))
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n "$workers" "$@"
