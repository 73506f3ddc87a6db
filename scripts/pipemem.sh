#!/usr/bin/env bash
# Runs `pipemem` with the interpreter PYTHON, or else that of scripts/setup.sh, or else python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
type -P "$python" >/dev/null || python=python3
exec "$python" -m megatron_pipemem "$@"
