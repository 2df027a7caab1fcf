#!/bin/sh
# Builds .venv-cuda for `make test-cuda`: the GPU packages of requirements/gpu.txt, Transformer
# Engine's torch extension compiled against them, and stand-ins for the driver's libraries (.venv-cuda/stubs). Needs a
# C++ compiler, Python's headers and 14 GB, and no GPU. .venv-cuda/.complete is written last.
set -eu

ENV=.venv-cuda
say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the GPU packages are for Linux on x86_64; this is $(uname -sm)"
command -v c++ >/dev/null || fail "Transformer Engine's torch extension wants a C++ compiler; install g++"
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ -e $ENV/.place ] || [ "${free:-99}" -ge 14 ] || fail "$ENV needs 14 GB of disk space and $(pwd) has $free GB free"
[ ! -e $ENV ] || [ -e $ENV/.place ] || fail "$ENV exists but was not made by make; move it away and run make again"
[ "$(cat $ENV/.place 2>/dev/null)" = "$(pwd)" ] || rm -rf $ENV  # copied or moved: its paths are wrong
if [ ! -e $ENV ]; then
    python=$(sh tools/find_python.sh)
    say "building $ENV with $python ..."
    mkdir $ENV
    pwd >$ENV/.place
    "$python" -m venv $ENV
fi
rm -f $ENV/.complete

install() {  # install WHAT PIP-ARGUMENTS...
    what=$1
    shift
    pip "$what" install "$@"
}

pip() {  # pip WHAT COMMAND PIP-ARGUMENTS...
    say "  $1"
    command=$2
    shift 2
    $ENV/bin/python -m pip "$command" --disable-pip-version-check --no-input --no-deps "$@" >$ENV/build.log 2>&1 || {
        tail -n 15 $ENV/build.log >&2
        fail "pip could not finish; its whole output is in $ENV/build.log. Run make again when the cause is fixed."
    }
}
install "the GPU packages (10 minutes)" -r requirements/gpu.txt -r requirements/dev.txt
export NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0
MAX_JOBS=${MAX_JOBS:-$(nproc)}
export MAX_JOBS
# The wheel is kept outside of the environment, for the next time: it depends on these alone.
WHEELS=.wheels-cuda/$(cat requirements/gpu.txt requirements/te-torch.txt | cksum | cut -d ' ' -f 1)
if ! ls $WHEELS/*.whl >/dev/null 2>&1; then
    pip "Transformer Engine's torch extension (compiled: up to an hour)" wheel --no-build-isolation \
        --wheel-dir $WHEELS.part -r requirements/te-torch.txt
    rm -rf $WHEELS  # complete at once, so that an interrupted one is not taken
    mv $WHEELS.part $WHEELS
fi
install "Transformer Engine's torch extension" $WHEELS/*.whl
install "rpg-megatron itself" --no-build-isolation --editable .
mkdir -p $ENV/stubs
cc -shared -fPIC -w -o $ENV/stubs/libcuda.so.1 tests/cuda/stubs.c
cc -shared -fPIC -w -DNVML -o $ENV/stubs/libnvidia-ml.so.1 tests/cuda/stubs.c
touch $ENV/.complete
say "$ENV is ready"
