#!/bin/sh
# Runs everything that needs a Hopper GPU, part by part, and prints one table of what came of it.
#
#   tools/gpu_check.sh SITE_DIR [PART...]
#
# SITE_DIR: folder for the GPU packages; made and filled from the archives if it holds none. Give it again to go on
# where another call stopped: results are kept in SITE_DIR/check, and without PARTs only those run that have none.
# Archives: $RPG_GPU_ARCHIVES, or shared/gpu or ../shared/gpu of the repository. Each part may take 8 minutes
# ($RPG_GPU_PART_SECONDS). Exit code: 0 all parts passed, 1 one failed or is missing, 2 wrong use, 77 no GPU.
set -u

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
SECONDS_A_PART=${RPG_GPU_PART_SECONDS:-480}

# name|what it shows: the number of the demand it answers
PARTS='site|1 the packages are unpacked and can be imported
smoke_te|1 Transformer Engine: BF16 and each FP8 recipe run
smoke_vllm|1 vLLM: BF16 and FP8 generate, sleep frees memory
tests|2 tests/gpu: names, numbers, parking, CUDA IPC
numbers|2 log-probs and gradients against float32, transformers, BF16
mismatch_bf16|2 mismatch with the engine in BF16
mismatch_fp8|2 mismatch with trainer and engine in FP8
run_06b_2k|3 colocated run, 0.6B shape, 2K responses
run_06b_8k|3 colocated run, 0.6B shape, 8K responses
run_4b_2k|3 colocated run, 4B shape, 2K responses
run_4b_8k|3 colocated run, 4B shape, 8K responses
update_4b|4 FP8 against BF16, 4B-shaped layers
update_8b|4 FP8 against BF16, 8B-shaped layers
logprobs|4 chunked log-probs against plain ones, 8K x 151,936
quickstart|5 the quickstart learns on the GPU, in float32 as on a CPU
quickstart_bf16|5 the same in BF16, with Transformer Engine'

say() { printf '%s\n' "$*"; }
fail() { say "error: $*" >&2; exit 2; }
names() { say "$PARTS" | cut -d '|' -f 1; }

usage() {
    say "usage: tools/gpu_check.sh SITE_DIR [PART...]"
    say "parts:"
    say "$PARTS" | awk -F '|' '{ printf "  %-14s %s\n", $1, $2 }'
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') usage >&2; exit 2 ;;
    -*) fail "unknown option $1; see tools/gpu_check.sh --help" ;;
esac
SITE=$1
shift
[ ! -e "$SITE" ] || [ -d "$SITE" ] || fail "$SITE is in the way and no folder"
for part; do
    names | grep -qx -- "$part" || fail "there is no part $part; known: $(names | tr '\n' ' ')"
done

has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

# One line a part: name, result, seconds. Results: passed, FAILED (code), TIMED OUT, skipped: why, not run.
table() {
    printf '%-14s %-22s %7s  %s\n' part result seconds shows
    say "$PARTS" | while IFS='|' read -r name shows; do
        result='not run' took=''
        if [ -n "${NO_GPU:-}" ]; then
            result='skipped: no GPU'
        elif [ -s "$RESULTS/$name" ]; then
            IFS='|' read -r result took <"$RESULTS/$name"
        fi
        printf '%-14s %-22s %7s  %s\n' "$name" "$result" "$took" "$shows"
    done
}

if ! has_gpu; then
    NO_GPU=1
    table
    exit 77
fi

mkdir -p "$SITE/check" || fail "$SITE cannot be made"
SITE=$(cd "$SITE" && pwd)
RESULTS=$SITE/check
for folder in "${RPG_GPU_ARCHIVES:-}" "$ROOT/shared/gpu" "$ROOT/../shared/gpu"; do
    [ -n "$folder" ] && [ -f "$folder/te.tar.xz" ] && ARCHIVES=$folder && break
done
export PYTHONPATH="$SITE:$ROOT" VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=4
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1

site() {
    if [ ! -d "$SITE/vllm" ] || [ ! -d "$SITE/transformer_engine" ]; then
        [ -n "${ARCHIVES:-}" ] || { say "no archives: set RPG_GPU_ARCHIVES to their folder"; return 1; }
        "$PYTHON" - "$ARCHIVES" "$SITE" <<'PY' || return 1
import glob, sys, tarfile
for name in sorted(glob.glob(f"{sys.argv[1]}/*.tar.xz")):
    print("unpacking", name, flush=True)
    tarfile.open(name).extractall(sys.argv[2], filter="data")
PY
    fi
    # vLLM finds our plug-in by the entry point of an installed package.
    "$PYTHON" - "$ROOT" "$SITE" <<'PY' || return 1
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1], "pyproject.toml").read_text())["project"]
info = pathlib.Path(sys.argv[2], f"rpg_megatron-{project['version']}.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items())
         for group, found in project["entry-points"].items()]
(info / "entry_points.txt").write_text("\n".join(lines))
PY
    "$PYTHON" - <<'PY'
import importlib, sys
import torch
print("Python", sys.version.split()[0], "torch", torch.__version__, torch.cuda.get_device_name(0))
missing = []
for name in ("transformer_engine.pytorch", "megatron.core", "vllm", "transformers", "safetensors", "datasets",
             "math_verify", "pydantic", "yaml", "typer", "rich", "httpx", "psutil", "zstandard", "schedulefree",
             "tensorboard", "rpg_megatron"):
    try:
        found = importlib.import_module(name)
        print(name, getattr(found, "__version__", ""))
    except Exception as e:
        missing.append(f"{name} ({type(e).__name__}: {e})")
print("missing:", "; ".join(missing) or "nothing")
sys.exit(bool(missing))
PY
}

smoke() {
    [ -n "${ARCHIVES:-}" ] || { say "no archives: set RPG_GPU_ARCHIVES to their folder"; return 1; }
    (cd "$RESULTS" && "$PYTHON" "$ARCHIVES/$1.py")
}

bench() {
    module=$1
    shift
    (cd "$ROOT" && "$PYTHON" -m "benchmarks.$module" "$@")
}

quickstart() {
    (cd "$RESULTS" && "$PYTHON" -m rpg_megatron.cli train "$ROOT/examples/quickstart.yaml" device=cuda \
        parallel.tensor=1 engine.colocated=true engine.kv_cache_gib=4 bridge.transport=cuda_ipc \
        "runs=$RESULTS/runs" "$@")
}

part() {
    case $1 in
        site) site ;;
        smoke_te | smoke_vllm) smoke "$1" ;;
        tests) (cd "$ROOT" && "$PYTHON" -m pytest tests/gpu -m gpu -p no:cacheprovider) ;;
        numbers) bench gpu_numbers ;;
        mismatch_bf16) bench gpu_run --shape 0.6b --response 512 --steps 3 ;;
        mismatch_fp8) bench gpu_run --shape 0.6b --response 512 --steps 3 --fp8 blockwise --engine-fp8 ;;
        run_06b_2k) bench gpu_run --shape 0.6b --response 2048 ;;
        run_06b_8k) bench gpu_run --shape 0.6b --response 8192 --prompts 8 ;;
        run_4b_2k) bench gpu_run --shape 4b --response 2048 --kv-cache-gib 20 ;;
        run_4b_8k) bench gpu_run --shape 4b --response 8192 --prompts 4 --steps 3 --kv-cache-gib 20 ;;
        update_4b) bench gpu_update --shape 4b --layers 12 ;;
        update_8b) bench gpu_update --shape 8b --layers 8 ;;
        logprobs) bench gpu_logprobs ;;
        quickstart) quickstart name=float32 ;;
        quickstart_bf16) quickstart name=bf16 precision.dtype=bfloat16 ;;
    esac
}

# A part runs as this script once more, so that it can be timed out with all that it started.
if [ -n "${RPG_GPU_CHECK_PART:-}" ]; then
    part "$RPG_GPU_CHECK_PART"
    exit
fi

if [ $# -eq 0 ]; then
    for name in $(names); do
        [ -s "$RESULTS/$name" ] || set -- "$@" "$name"
    done
fi
for name; do
    if [ "$name" = tests ] && ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
        say 'skipped: no pytest|' >"$RESULTS/$name"
        continue
    fi
    say "== $name (log: $RESULTS/$name.log)"
    began=$(date +%s)
    RPG_GPU_CHECK_PART=$name timeout -k 20 "$SECONDS_A_PART" sh "$0" "$SITE" >"$RESULTS/$name.log" 2>&1
    code=$?
    case $code in
        0) result=passed ;;
        124 | 137) result='TIMED OUT' ;;
        *) result="FAILED ($code)" ;;
    esac
    say "$result|$(($(date +%s) - began))" >"$RESULTS/$name"
    tail -n 25 "$RESULTS/$name.log"
done
say
table | tee "$RESULTS/table.txt"
! table | grep -q -e FAILED -e 'TIMED OUT' -e 'not run'
