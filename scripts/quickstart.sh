#!/usr/bin/env bash
# Makes .venv, trains the same small GPT under stock Megatron and under our schedules on 4 CPU ranks, and compares them.
# Every run starts from scratch, with dropout and the same random numbers (--pipemem-rng layerwise).
# Needs no GPU. Options: --iterations N, --only NAME ..., --output DIR, --verbose.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python scripts/quickstart.py "$@"
