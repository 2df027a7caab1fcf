#!/bin/sh
# Prints the path of a Python 3.12 that can make virtual environments, or says what to install (exit 1).
# Each candidate is run, not just found: pyenv's shims exist for versions that are not selected.

no_venv=""

usable() {
    [ -n "$1" ] && command -v "$1" >/dev/null 2>&1 || return 1
    found=$("$1" -c 'import sys; print(sys.executable if sys.version_info[:2] == (3, 12) else "")' 2>/dev/null) || return 1
    [ -n "$found" ] || return 1
    # Debian and Ubuntu ship the interpreter without the parts that venv needs.
    if ! "$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        no_venv=$found
        return 1
    fi
    printf '%s\n' "$found"
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    echo "error: PYTHON=$PYTHON is not a Python 3.12 that can make virtual environments; unset it or point it to one" >&2
    exit 1
fi

for candidate in python3.12 python3; do
    usable "$candidate" && exit 0
done

for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null)" /opt/pyenv /usr/local/pyenv; do
    [ -n "$root" ] || continue
    for candidate in "$root"/versions/3.12*/bin/python3.12; do
        usable "$candidate" && exit 0
    done
done

usable "$(uv python find 3.12 2>/dev/null)" && exit 0

for candidate in /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/python3.12/bin/python3.12 \
    /opt/python/3.12*/bin/python3.12 /opt/python/cp312-cp312/bin/python3.12 \
    "${HOME:-}"/.local/bin/python3.12 "${HOME:-}"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
    "${CONDA_PREFIX:-}/bin/python3.12" "${HOME:-}"/miniconda3/envs/*/bin/python3.12 \
    "${HOME:-}"/miniforge3/envs/*/bin/python3.12 /opt/conda/bin/python3.12 /opt/conda/envs/*/bin/python3.12; do
    usable "$candidate" && exit 0
done

if [ -n "$no_venv" ]; then
    echo "error: $no_venv is a Python 3.12 without the venv module; install it (Debian, Ubuntu: python3.12-venv)" >&2
    exit 1
fi
cat >&2 <<'MESSAGE'
error: Python 3.12 was not found. Install it in one of these ways, or set PYTHON to one:
  Debian, Ubuntu   apt install python3.12 python3.12-venv
  Fedora, RHEL     dnf install python3.12
  anywhere         pyenv install 3.12     or     uv python install 3.12     or     conda create -n py312 python=3.12
MESSAGE
exit 1
