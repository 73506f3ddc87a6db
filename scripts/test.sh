#!/usr/bin/env bash
# Runs the whole test suite; arguments go to pytest, for example: ./scripts/test.sh tests/schedule -k v-half
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# Tests that start processes of their own run one after another; the others share the cores.
alone="tests/end_to_end tests/runtime tests/benchmarks tests/scripts tests/cpu tests/slurm"
failed=0
# shellcheck disable=SC2086
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto $(printf -- '--ignore=%s ' $alone) tests || failed=1
# shellcheck disable=SC2086
.venv/bin/python -m pytest $alone || failed=1
exit $failed
