#!/usr/bin/env bash
# Runs the whole test suite; arguments go to pytest, for example: ./scripts/test.sh tests/schedule -k v-half
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
