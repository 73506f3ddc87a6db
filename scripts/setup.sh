#!/usr/bin/env bash
# Makes .venv with all packages that quickstart.sh and test.sh need. If nothing has changed, it exits at once.
# PIPEMEM_PYTHON=/path/to/python overrides the search for an interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv

# An interpreter must really run: pyenv has shims for versions that are not selected, and these fail.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

candidates() {
    if [ -n "${PIPEMEM_PYTHON:-}" ]; then
        echo "$PIPEMEM_PYTHON"
        return
    fi
    local version name
    # 3.12 first, because the pinned packages were tested with it.
    for version in 3.12 3.13 3.14; do
        type -aP "python$version" || true
    done
    type -aP python3 || true
    type -aP python || true
    for name in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        if [ -n "$name" ]; then
            ls -d "$name"/versions/3.1[2-9]*/bin/python3 2>/dev/null || true
        fi
    done
    if type -P uv >/dev/null; then
        uv python find '>=3.12' 2>/dev/null || true
    fi
}

find_python() {
    local python
    while read -r python; do
        if usable "$python"; then
            echo "$python"
            return
        fi
    done < <(candidates)
    # uv can download an interpreter if none is installed.
    if [ -z "${PIPEMEM_PYTHON:-}" ] && type -P uv >/dev/null && uv python install 3.12 >/dev/null 2>&1; then
        uv python find 3.12
        return
    fi
    echo "setup.sh: no Python >= 3.12 with venv and pip was found; install one with 'apt-get install python3.12-venv'," \
        "'pyenv install 3.12' or 'uv python install 3.12', or set PIPEMEM_PYTHON to its path." >&2
    return 1
}

# Shows only the slow parts of pip's output: large downloads and unpacking.
install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@" |
        sed -un '/ MB)$/s/^ *Downloading /setup.sh:   downloading /p; s/^Installing collected packages.*/setup.sh:   unpacking/p'
}

wanted=$(cat requirements.txt pyproject.toml | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.pipemem-stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python=$(find_python)
echo "setup.sh: using $("$python" --version) at $python"
if ! [ -x "$venv/bin/python" ] || ! usable "$venv/bin/python"; then
    echo "setup.sh: making $venv"
    "$python" -m venv --clear "$venv"
fi
echo "setup.sh: installing the pinned packages (some minutes the first time)"
install -r requirements.txt
echo "setup.sh: installing megatron_pipemem"
# Compiles what runs import. pip would compile 17,000 files one after another, which takes a minute.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'import megatron_pipemem.tools.cli.app, megatron_pipemem.tools.cpu.warm' \
    >/dev/null 2>&1 &
install --no-deps --editable .
wait
echo "$wanted" >"$venv/.pipemem-stamp"
echo "setup.sh: ready; activate with 'source $venv/bin/activate'"
