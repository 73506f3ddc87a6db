#!/usr/bin/env bash
# Runs the tests in one of three lanes:
#   ./scripts/test.sh             before each commit: every kind of test, on cases that cover all differences
#   ./scripts/test.sh --quick     during work: some tests of every package (tests/quick.txt)
#   ./scripts/test.sh --nightly   the tests that the full lane leaves out (marker "nightly"): sweeps, more versions, a browser;
#                                 and property tests with twice as many examples
# Other arguments go to pytest, for example: ./scripts/test.sh tests/schedule -k v-half
# Every run ends with its longest tests. On Debian, root's tests install the programs that pip cannot install: Slurm and
# Chromium (tests/machine/debian.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
# Hundreds of processes import the package. Without bytecode files, each would compile it again.
unset PYTHONDONTWRITEBYTECODE
cores=$(getconf _NPROCESSORS_ONLN)
# One worker more than cores, because tests that start ranks wait at times (tests/conftest.py). Each further worker imports
# Megatron and collects all tests, and no core is idle by then.
workers=$((cores + 1))
case ${1-} in
    --quick)
        shift
        mapfile -t chosen < <(grep -v -e '^#' -e '^$' tests/quick.txt)
        set -- "${chosen[@]}" "$@"
        ;;
    --nightly)
        shift
        set -- -m "nightly or hypothesis" --hypothesis-profile thorough "$@"
        ;;
    ?*) exec .venv/bin/python -m pytest "$@" ;;
esac
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n "$workers" --durations=20 "$@"
