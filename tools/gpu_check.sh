#!/bin/sh
# Runs everything that needs a Hopper GPU, part by part, and prints one table of what came of it.
#
#   tools/gpu_check.sh SITE_DIR [PART...]
#
# SITE_DIR: folder for the GPU packages; made and filled from the archives that are there, each of them once. Give it
# again to go on where another call stopped: results are kept in SITE_DIR/check, and without PARTs only those run that
# have none. A part whose packages have not come yet waits for a call that brings them.
# Archives and smoke tests: $RPG_GPU_ARCHIVES, or shared/gpu or ../shared/gpu of the repository.
# The call ends by itself after 9.5 minutes ($RPG_GPU_SECONDS): no part begins for which too little is left, none may
# take longer than 7 minutes ($RPG_GPU_PART_SECONDS). If $RPG_GPU_OUT is a folder, table and logs are copied there as
# they come.
# Exit code: 0 all parts passed, 1 one failed or is missing, 2 wrong use, 77 no GPU.
set -u

BEGAN=$(date +%s)
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
SECONDS_ALL=${RPG_GPU_SECONDS:-570}
SECONDS_A_PART=${RPG_GPU_PART_SECONDS:-420}

# name|packages that it needs|seconds that have to be left|number of the demand, and what it shows
# The seconds are guesses: nothing of it has run.
PARTS='site||20|1 what is unpacked can be imported
smoke_te|te|60|1 Transformer Engine: BF16 and each FP8 recipe run
smoke_vllm|vllm|60|1 vLLM: BF16 and FP8 generate, sleep frees memory
numbers|te|60|2 log-probs and gradients against float32, transformers, BF16
tests|te|120|2 tests/gpu: names, numbers, parking, CUDA IPC
run_06b_2k|te vllm|120|3 colocated run, 0.6B shape, 2K responses
run_4b_2k|te vllm|150|3 colocated run, 4B shape, 2K responses
mismatch_bf16|te vllm|100|2 mismatch with the engine in BF16
mismatch_fp8|te vllm|100|2 mismatch with trainer and engine in FP8
run_06b_8k|te vllm|180|3 colocated run, 0.6B shape, 8K responses
run_4b_8k|te vllm|220|3 colocated run, 4B shape, 8K responses
update_4b|te|80|4 FP8 against BF16, 4B-shaped layers
update_8b|te|80|4 FP8 against BF16, 8B-shaped layers
logprobs|te|40|4 chunked log-probs against plain ones, 8K x 151,936
quickstart_bf16|te vllm|120|5 the quickstart in BF16, with Transformer Engine
quickstart|te vllm|120|5 the quickstart in float32, as on a CPU
colocated|te vllm|120|3 tests/gpu: a colocated run with checkpoints, traces, sleep'

say() { printf '%s\n' "$*"; }
fail() { say "error: $*" >&2; exit 2; }
names() { say "$PARTS" | cut -d '|' -f 1; }
about() { say "$PARTS" | awk -F '|' -v name="$1" -v field="$2" '$1 == name { print $field }'; }

usage() {
    say "usage: tools/gpu_check.sh SITE_DIR [PART...]"
    say "parts:"
    say "$PARTS" | awk -F '|' '{ printf "  %-15s %s\n", $1, $4 }'
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
    printf '%-15s %-22s %7s  %s\n' part result seconds shows
    say "$PARTS" | while IFS='|' read -r name _ _ shows; do
        result='not run' took=''
        if [ -n "${NO_GPU:-}" ]; then
            result='skipped: no GPU'
        elif [ -s "$RESULTS/$name" ]; then
            IFS='|' read -r result took <"$RESULTS/$name"
        fi
        printf '%-15s %-22s %7s  %s\n' "$name" "$result" "$took" "$shows"
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
ARCHIVES=
for folder in "${RPG_GPU_ARCHIVES:-}" "$ROOT/shared/gpu" "$ROOT/../shared/gpu"; do
    [ -n "$folder" ] && ls "$folder"/*.tar.xz >/dev/null 2>&1 && ARCHIVES=$(cd "$folder" && pwd) && break
done
export PYTHONPATH="$SITE:$ROOT" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# The machine may have no network but the loopback, and no name that leads to it.
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo

has() { case $1 in te) [ -d "$SITE/transformer_engine" ] ;; vllm) [ -d "$SITE/vllm" ] ;; esac; }

# Unpacks the archives that were not yet, and tells vLLM of our plug-in, which it finds by an installed package.
unpack() {
    "$PYTHON" - "$ARCHIVES" "$SITE" "$ROOT" <<'PY'
import pathlib, shutil, sys, tarfile, time, tomllib
site, root = map(pathlib.Path, sys.argv[2:])
for name in sorted(pathlib.Path(sys.argv[1]).iterdir()) if sys.argv[1] else []:
    done = site / "check" / f"{name.name}.unpacked"
    if name.suffix == ".py":
        shutil.copy(name, site / "check")
    elif name.name.endswith(".tar.xz") and not done.exists():
        began = time.monotonic()
        tarfile.open(name).extractall(site, filter="data")
        done.touch()
        print(f"unpacked {name.name} in {time.monotonic() - began:.0f} s", flush=True)
# Folders without an __init__.py: any package of that name, wherever it is installed, would be taken for ours.
for name in ("benchmarks", "tests"):
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text(f"__path__ = [{str(root / name)!r}]\n")
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
info = site / f"rpg_megatron-{project['version']}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items())
         for group, found in project["entry-points"].items()]
(info / "entry_points.txt").write_text("\n".join(lines))
PY
}

site() {
    "$PYTHON" - "$SITE" <<'PY'
import importlib, os, sys
import torch
print("Python", sys.version.split()[0], "torch", torch.__version__, torch.cuda.get_device_name(0))
missing = []
names = ["transformers", "safetensors", "datasets", "math_verify", "pydantic", "yaml", "typer", "rich", "httpx",
         "psutil", "zstandard", "schedulefree", "tensorboard", "pytest", "rpg_megatron"]
for folder, found in (("transformer_engine", ["transformer_engine.pytorch", "megatron.core"]),
                      ("vllm", ["vllm", "vllm.entrypoints.openai.api_server", "rpg_megatron.bridge.vllm_plugin",
                                "vllm.v1.worker.gpu.model_runner", "vllm.model_executor.models.qwen3"])):
    names += found if os.path.isdir(os.path.join(sys.argv[1], folder)) else []
for name in names:
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
    [ -f "$RESULTS/$1.py" ] || { say "$1.py did not come with the archives"; return 1; }
    (cd "$RESULTS" && "$PYTHON" "$1.py")
}

# One engine a process: the memory of a second one that can sleep is refused while the first one's pool is there.
smoke_vllm() {
    for kind in None "'fp8'"; do
        sed "s/^for q in (None, 'fp8'):/for q in ($kind,):/" "$RESULTS/smoke_vllm.py" >"$RESULTS/smoke_vllm_one.py"
        smoke smoke_vllm_one || return 1
    done
}

tests() {
    (cd "$ROOT" && "$PYTHON" -m pytest -m gpu -p no:cacheprovider --basetemp "$RESULTS/pytest" "$@")
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
        smoke_te) smoke smoke_te ;;
        smoke_vllm) smoke_vllm ;;
        numbers) bench gpu_numbers ;;
        tests) tests tests/gpu --ignore tests/gpu/test_colocated_gpu.py ;;
        colocated) tests tests/gpu/test_colocated_gpu.py ;;
        mismatch_bf16) bench gpu_run --shape 0.6b --response 512 --steps 2 --kv-cache-gib 10 ;;
        mismatch_fp8)
            bench gpu_run --shape 0.6b --response 512 --steps 2 --kv-cache-gib 10 --fp8 blockwise --engine-fp8
            ;;
        run_06b_2k) bench gpu_run --shape 0.6b --response 2048 --steps 4 --kv-cache-gib 32 ;;
        run_06b_8k) bench gpu_run --shape 0.6b --response 8192 --steps 3 --prompts 4 --kv-cache-gib 32 ;;
        run_4b_2k) bench gpu_run --shape 4b --response 2048 --steps 3 --prompts 8 --kv-cache-gib 24 ;;
        run_4b_8k) bench gpu_run --shape 4b --response 8192 --steps 2 --prompts 2 --kv-cache-gib 24 ;;
        update_4b) bench gpu_update --shape 4b --layers 12 --repeat 6 ;;
        update_8b) bench gpu_update --shape 8b --layers 8 --repeat 6 ;;
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

# What a part that did not end in order may have left on the GPU goes when its processes do.
wait_for_gpu() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i 0 2>/dev/null)
        [ "${used:-0}" -gt 2048 ] 2>/dev/null || return
        sleep 1
    done
    say "$used MiB of the GPU are still in use"
}

# Two files, for whoever has to carry them off the machine.
keep() {
    table >"$RESULTS/table.txt"
    [ -d "${RPG_GPU_OUT:-}" ] || return
    cp "$RESULTS/table.txt" "$RPG_GPU_OUT/gpu_check.txt"
    (cd "$RESULTS" && tar -czf "$RPG_GPU_OUT/gpu_check.tar.gz" ./*.log $(ls -d runs/*/logs runs/*/metrics.jsonl 2>/dev/null))
}

unpack >"$RESULTS/unpack.log" 2>&1 || { tail -n 5 "$RESULTS/unpack.log"; fail "the archives in $ARCHIVES are damaged"; }
cat "$RESULTS/unpack.log"
if [ $# -eq 0 ]; then
    for name in $(names); do
        [ "$name" = site ] && [ -s "$RESULTS/unpack.log" ] && rm -f "$RESULTS/site"
        [ -s "$RESULTS/$name" ] || set -- "$@" "$name"
    done
fi
for name; do
    missing=
    for package in $(about "$name" 2); do
        has "$package" || missing="$missing $package"
    done
    left=$((BEGAN + SECONDS_ALL - $(date +%s)))
    if [ -n "$missing" ]; then
        say "== $name waits for the archives:$missing"
        continue
    elif [ "$left" -lt "$(about "$name" 3)" ]; then
        say "== $name waits for another call: $left s are left"
        continue
    fi
    say "== $name (log: $RESULTS/$name.log; $left s left)"
    began=$(date +%s)
    limit=$((left - 15 < SECONDS_A_PART ? left - 15 : SECONDS_A_PART))
    RPG_GPU_CHECK_PART=$name timeout -k 10 "$limit" sh "$0" "$SITE" >"$RESULTS/$name.log" 2>&1
    code=$?
    case $code in
        0) result=passed ;;
        124 | 137) result='TIMED OUT' ;;
        *) result="FAILED ($code)" ;;
    esac
    say "$result|$(($(date +%s) - began))" >"$RESULTS/$name"
    tail -n 25 "$RESULTS/$name.log"
    keep
    [ "$code" -eq 0 ] || wait_for_gpu
done
keep
say
cat "$RESULTS/table.txt"
! grep -q -e FAILED -e 'TIMED OUT' -e 'not run' "$RESULTS/table.txt"
