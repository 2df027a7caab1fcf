#!/bin/sh
# Runs all checks that need a Hopper GPU, part by part, and prints one table of results.
#
#   tools/gpu_check.sh SITE_DIR [PART...]
#
# SITE_DIR: folder for the GPU packages; created, and filled from the available archives, each once. Packages that Python
# finds elsewhere count as installed. Give the same folder to resume an earlier call: results are kept in
# SITE_DIR/check, and without PARTs only parts without a result run. A part whose packages are missing waits for a call
# that brings them; the table lists the archives it needs.
#
# Variables:
#   RPG_GPU_ARCHIVES      folder of the archives and smoke tests; else shared/gpu or ../shared/gpu of the repository
#   RPG_GPU_EARLIER       the table of an earlier call whose machine and SITE_DIR are gone: its results count for this
#                         call. Default: gpu_check.txt in RPG_GPU_OUT or in the folder of the archives, if it exists
#   RPG_GPU_OUT           folder to which three files are copied as parts end: the table (gpu_check.txt), the ends of
#                         failed parts' logs (gpu_check_failed.txt) and all logs and metrics (gpu_check.tar.gz)
#   RPG_GPU_SECONDS       time limit of the call, 570: parts that need more than the rest are not started
#   RPG_GPU_PART_SECONDS  time limit of a part, 420 (run_4b_*: 540)
# If cuda_ipc fails, runs sync weights over process_group; the table says it.
# Exit code: 0 all parts passed, 1 a part failed or is missing, 2 usage error, 77 no GPU.
set -u

BEGAN=$(date +%s)
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
SECONDS_ALL=${RPG_GPU_SECONDS:-570}

# name|required packages|seconds that must be left|number of the requirement, and what the part shows
# Ordered by importance: does it load, does a colocated run work, is the mismatch small, are the numbers right; then
# speed. Seconds: of parts that have run, what they took on an H200 with empty caches, and some more; else guesses.
PARTS='site||25|1 what is unpacked can be imported
smoke_te|te|40|1 Transformer Engine: BF16 and each FP8 recipe run
cuda_ipc|te app deps|70|1 weights in GPU memory, read by another process
smoke_vllm|deps vllm|90|1 vLLM: BF16 and FP8 generate, sleep frees memory
run_06b_2k|te app deps vllm|240|3 colocated run, 0.6B shape, 2K responses
mismatch_bf16|te app deps vllm|150|2 mismatch with the engine in BF16
mismatch_fp8|te app deps vllm|220|2 mismatch with trainer and engine in FP8
numbers|te app deps|80|2 log-probs and gradients against float32, transformers, BF16
tests|te app deps|150|2 tests/gpu: names, numbers, offloading
two_gpus|te app deps|100|1 two ranks: one that waits leaves its GPU idle; weights are read meanwhile
run_06b_8k|te app deps vllm|180|3 colocated run, 0.6B shape, 8K responses
run_4b_2k|te app deps vllm|400|3 colocated run, 4B shape, 2K responses
update_4b|te app deps|70|4 FP8 against BF16, 4B-shaped layers
update_8b|te app deps|100|4 FP8 against BF16, 8B-shaped layers
logprobs|te app deps|40|4 chunked log-probs against plain ones, 8K x 151,936
run_4b_8k|te app deps vllm|400|3 colocated run, 4B shape, 8K responses
quickstart_bf16|te app deps vllm|115|5 the quickstart in BF16, with Transformer Engine
quickstart|te app deps vllm|120|5 the quickstart in float32, as on a CPU
colocated|te app deps vllm|165|3 tests/gpu: a colocated run with checkpoints, traces, sleep'

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

# One line per part: name, result, seconds; below it, if needed, one line with the reason.
# Results: passed, FAILED (code), TIMED OUT, skipped: why, not run. A later call reads them.
table() {
    [ -s "${RESULTS:-/nowhere}/on" ] && cat "$RESULTS/on"
    printf '%-15s %-22s %7s  %s\n' part result seconds shows
    say "$PARTS" | while IFS='|' read -r name _ _ shows; do
        result='not run' took='' when='' needs=''
        if [ -n "${NO_GPU:-}" ]; then
            result='skipped: no GPU'
        elif [ -s "$RESULTS/$name" ]; then
            IFS='|' read -r result took when <"$RESULTS/$name"
        elif lacks_gpus "$name"; then
            result='skipped: needs 2 GPUs'
        else
            needs=$(needs_of "$name")
        fi
        printf '%-15s %-22s %7s  %s\n' "$name" "$result" "$took" "$shows${when:+ ($when)}${needs:+ (needs$needs)}"
        [ -z "${NO_GPU:-}" ] && [ -s "$RESULTS/$name.why" ] && printf '%15s why: %s\n' '' "$(cat "$RESULTS/$name.why")"
    done
    return 0
}

if ! has_gpu; then
    NO_GPU=1
    table
    exit 77
fi

mkdir -p "$SITE/check" || fail "$SITE cannot be made"
SITE=$(cd "$SITE" && pwd)
RESULTS=$SITE/check
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
lacks_gpus() { [ "$1" = two_gpus ] && [ "$GPUS" -lt 2 ]; }
ARCHIVES=
for folder in "${RPG_GPU_ARCHIVES:-$ROOT/shared/gpu}" "${RPG_GPU_ARCHIVES:-$ROOT/../shared/gpu}"; do
    ls "$folder"/*.tar.xz >/dev/null 2>&1 && ARCHIVES=$(cd "$folder" && pwd) && break
done
export PYTHONPATH="$SITE:$ROOT" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# The machine may have only a loopback network, and a host name that does not resolve.
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo

# Each archive is detected by a package that only it contains: in SITE_DIR, or wherever Python finds it.
has() {
    case $1 in
        te) module=transformer_engine ;;
        app) module=math_verify ;;
        deps) module=xgrammar ;;
        *) module=vllm ;;
    esac
    [ -d "$SITE/$module" ] || case " ${FOUND:-} " in *" $module "*) ;; *) return 1 ;; esac
}
missing_for() { for package; do has "$package" || printf ' %s.tar.xz' "$package"; done; }

# What a part waits for: archives, or a smoke test that is delivered with them.
needs_of() {
    missing_for $(about "$1" 2)
    case $1 in smoke_*) [ -f "$RESULTS/$1.py" ] || printf ' %s.py' "$1" ;; esac
}

# Unpacks new archives, and registers the plug-in for vLLM, which finds it through an installed package.
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
# Folders without an __init__.py: an installed package of that name would be imported instead of ours.
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

# vLLM's and Transformer Engine's extensions load with the torch that they were built for, and no other.
check_torch() {
    "$PYTHON" - "$SITE" <<'PY'
import importlib.metadata, pathlib, re, sys
for file in pathlib.Path(sys.argv[1]).glob("vllm-*.dist-info/METADATA"):
    needed = re.search(r"^Requires-Dist: torch==([\d.]+)", file.read_text(errors="replace"), re.M)
    found = importlib.metadata.version("torch").partition("+")[0]
    if needed and needed[1] != found:
        sys.exit(f"{file.parent.name.removesuffix('.dist-info')} in {sys.argv[1]} needs torch {needed[1]}, and Python "
                 f"has {found}; use archives for it, and a commit whose requirements/gpu.txt has it")
PY
}

site() {
    "$PYTHON" - "$FOUND" "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null)" <<'PY'
import importlib, sys
import torch
cards = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, driver {sys.argv[2]}"
versions = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
missing = []
names = ["transformers", "safetensors", "yaml", "httpx", "psutil", "tensorboard", "pytest"]
for needed, found in (
    ("transformer_engine", ["pydantic", "transformer_engine.pytorch", "megatron.core"]),
    ("math_verify", ["datasets", "math_verify", "typer", "rich", "schedulefree"]),
    ("transformer_engine math_verify", ["rpg_megatron.cli"]),
    ("vllm xgrammar", ["vllm", "vllm.entrypoints.openai.api_server", "vllm.v1.worker.gpu.model_runner",
                       "vllm.model_executor.models.qwen3", "rpg_megatron.bridge.vllm.plugin"]),
):
    names += found if set(needed.split()) <= set(sys.argv[1].split()) else []
for name in names:
    try:
        version = getattr(importlib.import_module(name), "__version__", "")
        print(name, version)
        if name in ("transformer_engine.pytorch", "megatron.core", "vllm"):
            versions.append(f"{name.partition('.')[0]} {version}")
    except Exception as e:
        missing.append(f"{name} ({type(e).__name__}: {e})")
print("on:", cards + ";", ", ".join(versions))
print("missing:", "; ".join(missing) or "nothing")
sys.exit(bool(missing))
PY
}

smoke() { (cd "$RESULTS" && "$PYTHON" "$1.py"); }

# One engine per process: a second engine with sleep mode cannot allocate while the first one's pool exists.
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

# The transport for engines on the same GPU: not CUDA IPC if that part failed.
transport() {
    case $(cat "$RESULTS/cuda_ipc" 2>/dev/null) in FAILED* | TIMED*) say process_group ;; *) say cuda_ipc ;; esac
}

run() { bench gpu run --transport "$(transport)" "$@"; }

quickstart() {
    (cd "$RESULTS" && "$PYTHON" -m rpg_megatron.cli train "$ROOT/examples/quickstart.yaml" device=cuda \
        parallel.tensor=1 engine.colocated=true engine.kv_cache_gib=4 "bridge.transport=$(transport)" \
        "runs=$RESULTS/runs" "$@")
}

part() {
    case $1 in
        site) site ;;
        smoke_te) smoke smoke_te ;;
        smoke_vllm) smoke_vllm ;;
        numbers) bench mismatch precisions --layers 8 ;;
        cuda_ipc) tests tests/gpu/test_cuda_ipc.py ;;
        two_gpus) tests tests/gpu/test_two_gpus.py ;;
        tests)
            tests tests/gpu --ignore tests/gpu/test_colocated_gpu.py --ignore tests/gpu/test_cuda_ipc.py \
                --ignore tests/gpu/test_two_gpus.py
            ;;
        colocated) tests tests/gpu/test_colocated_gpu.py ;;
        mismatch_bf16) run --shape 0.6b --response 512 --steps 2 --kv-cache-gib 10 ;;
        mismatch_fp8)
            run --shape 0.6b --response 512 --steps 2 --kv-cache-gib 10 --fp8 blockwise --engine-fp8
            ;;
        run_06b_2k) run --shape 0.6b --response 2048 --steps 4 --kv-cache-gib 32 ;;
        run_06b_8k) run --shape 0.6b --response 8192 --steps 3 --prompts 4 --kv-cache-gib 32 ;;
        run_4b_2k) run --shape 4b --response 2048 --steps 3 --prompts 8 --kv-cache-gib 24 ;;
        run_4b_8k) run --shape 4b --response 8192 --steps 2 --prompts 2 --kv-cache-gib 24 ;;
        update_4b) bench gpu update --shape 4b --layers 12 --repeat 6 ;;
        update_8b) bench gpu update --shape 8b --layers 8 --repeat 6 ;;
        logprobs) bench gpu logprobs ;;
        quickstart) quickstart name=float32 ;;
        quickstart_bf16) quickstart name=bf16 precision.dtype=bfloat16 ;;
    esac
}

FOUND=$("$PYTHON" -c '
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])
' transformer_engine math_verify xgrammar vllm 2>/dev/null)

# A part runs in another process of this script, so that a timeout ends everything it started.
if [ -n "${RPG_GPU_CHECK_PART:-}" ]; then
    part "$RPG_GPU_CHECK_PART"
    exit
fi

# Reads the results of an earlier call's table, except for parts that have one here.
read_earlier() {
    grep -q '^part  *result' "$1" || fail "$1 is no table of this script"
    [ -s "$RESULTS/on" ] || grep '^on: ' "$1" >"$RESULTS/on"
    for name in $(names); do
        row=$(grep "^$name " "$1" | head -n 1)
        result=$(say "$row" | cut -c 17-38 | sed 's/ *$//')
        case $result in passed* | FAILED* | 'TIMED OUT') ;; *) continue ;; esac
        [ -s "$RESULTS/$name" ] && continue
        say "$result|$(say "$row" | cut -c 39-46 | tr -d ' ')|earlier" >"$RESULTS/$name"
        grep -A 1 "^$name " "$1" | sed -n '2s/^  *why: //p' >"$RESULTS/$name.why"
    done
}

# Memory that a failed part left on the GPU is freed when its processes end.
wait_for_gpu() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i 0 2>/dev/null)
        [ "${used:-0}" -gt 2048 ] 2>/dev/null || return
        sleep 1
    done
    say "$used MiB of the GPU are still in use"
}

# Three files to copy off the machine; the end of a log is the most useful part.
keep() {
    table >"$RESULTS/table.txt"
    [ -d "${RPG_GPU_OUT:-}" ] || return
    cp "$RESULTS/table.txt" "$RPG_GPU_OUT/gpu_check.txt"
    for name in $(names); do
        grep -qsE '^(FAILED|TIMED)' "$RESULTS/$name" && [ -s "$RESULTS/$name.log" ] || continue
        say "==== $name"
        tail -n 80 "$RESULTS/$name.log" | tail -c 16000
    done >"$RPG_GPU_OUT/gpu_check_failed.txt"
    rm -rf "$RESULTS/kept"
    (cd "$RESULTS" && for file in ./*.log runs/*/logs/* runs/*/metrics.jsonl; do
        [ -f "$file" ] || continue
        mkdir -p "kept/$(dirname "$file")" && tail -c 500000 "$file" >"kept/$file"
    done)
    [ -d "$RESULTS/kept" ] && (cd "$RESULTS/kept" && tar -czf "$RPG_GPU_OUT/gpu_check.tar.gz" .)
}

# The last line of a log that contains an error, else the last line.
why() {
    line=$(grep -aE '([A-Za-z_]+(Error|Exception|Exit|Expired)|[Ee]rror|FAILED)[: ]' "$1" | tail -n 1)
    [ -n "$line" ] || line=$(grep -av '^ *$' "$1" | tail -n 1)
    say "$line" | tr -d '\r' | cut -c 1-200
}

# Runs a part; sets the code, the result, and the line below it in the table.
run_part() {
    longest=${RPG_GPU_PART_SECONDS:-$(case $1 in run_4b_*) say 540 ;; *) say 420 ;; esac)}
    left=$((BEGAN + SECONDS_ALL - $(date +%s)))
    limit=$((left - 15 < longest ? left - 15 : longest))
    RPG_GPU_CHECK_PART=$1 timeout -k 10 "$limit" sh "$0" "$SITE" >>"$RESULTS/$1.log" 2>&1
    code=$?
    because=
    case $code in
        0) result=passed ;;
        124 | 137) result='TIMED OUT' because="no end after $limit s; the log ends with: $(why "$RESULTS/$1.log")" ;;
        *) result="FAILED ($code)" because=$(why "$RESULTS/$1.log") ;;
    esac
}

unpack >"$RESULTS/unpack.log" 2>&1 || { tail -n 5 "$RESULTS/unpack.log"; fail "the archives in $ARCHIVES are damaged"; }
cat "$RESULTS/unpack.log"
check_torch || exit 2
if [ -n "${RPG_GPU_EARLIER:-}" ]; then
    [ -f "$RPG_GPU_EARLIER" ] || fail "RPG_GPU_EARLIER: there is no file $RPG_GPU_EARLIER"
    read_earlier "$RPG_GPU_EARLIER"
else
    for folder in "${RPG_GPU_OUT:-}" "${RPG_GPU_ARCHIVES:-}" "$ARCHIVES"; do
        [ -n "$folder" ] && [ -f "$folder/gpu_check.txt" ] && read_earlier "$folder/gpu_check.txt" && break
    done
fi
lacking=$(missing_for te app deps vllm)
if [ -n "$lacking" ]; then
    say "not in $SITE:$lacking; archives: ${ARCHIVES:-none${RPG_GPU_ARCHIVES:+ in $RPG_GPU_ARCHIVES}}"
fi
if [ $# -eq 0 ]; then
    for name in $(names); do
        [ "$name" = site ] && [ -s "$RESULTS/unpack.log" ] && rm -f "$RESULTS/site"
        [ -s "$RESULTS/$name" ] || set -- "$@" "$name"
    done
fi
for name; do
    needs=$(needs_of "$name")
    left=$((BEGAN + SECONDS_ALL - $(date +%s)))
    if [ -n "$needs" ]; then
        say "== $name waits for:$needs"
        continue
    elif lacks_gpus "$name"; then
        say "== $name needs two GPUs, and $GPUS is here"
        continue
    elif [ "$left" -lt "$(about "$name" 3)" ]; then
        say "== $name waits for another call: $left s are left"
        continue
    fi
    say "== $name (log: $RESULTS/$name.log; $left s left)"
    began=$(date +%s)
    rm -f "$RESULTS/$name.log" "$RESULTS/$name.why"
    run_part "$name"
    case $(transport)$(about "$name" 2) in
        process_group*app*vllm) because="${because:+$because; }weights over process_group, for cuda_ipc failed" ;;
    esac
    say "$result|$(($(date +%s) - began))|" >"$RESULTS/$name"
    [ -z "$because" ] || say "$because" >"$RESULTS/$name.why"
    [ "$name" = site ] && grep '^on: ' "$RESULTS/site.log" >"$RESULTS/on"
    tail -n 25 "$RESULTS/$name.log"
    keep
    [ "$code" -eq 0 ] || wait_for_gpu
done
keep
say
cat "$RESULTS/table.txt"
! grep -v '^ *why: ' "$RESULTS/table.txt" | grep -q -e FAILED -e 'TIMED OUT' -e 'not run'
