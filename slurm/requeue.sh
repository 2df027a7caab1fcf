# Sourced by the job scripts beside it: the options of srun, and what happens to a job whose command has ended.

# JOB_SETUP: a file of yours that is sourced first: module load, export HF_HOME, NCCL_...
if [ -n "${JOB_SETUP:-}" ]; then
    set +u # functions of modules and conda use variables that are not set
    source "$JOB_SETUP" || exit 1
    set -u
fi
step=(--ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE")
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    mounts=$PWD:$PWD${HF_HOME:+,$HF_HOME:$HF_HOME}${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
fi
rpg=${RPG_MEGATRON:-rpg-megatron}

# A task of an array is a run of its own: a seed, or a study's. With CHAIN=1 all are one run.
chain=${CHAIN:+${SLURM_ARRAY_JOB_ID:-}}
job=$SLURM_JOB_ID
task=()
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # the number of the last task is that of the whole array
    [ -n "$chain" ] || task=(--task "$SLURM_ARRAY_TASK_ID")
fi
# After a failure of the machine the launcher writes into it how many seconds to wait, and nodes to leave out.
export RPG_RESTART_FILE=$PWD/.restart-$job
rm -f "$RPG_RESTART_FILE"

# Slurm signals the command as well, which saves and exits; this shell ignores signals and waits for it.
trap : TERM USR1
requeue() { # MESSAGE SECONDS [NODES]
    trap '' TERM # Slurm sends it when the job is requeued; what is ignored here is ignored by scontrol
    [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ] || return # it is being cancelled
    if [ -n "${3:-}" ]; then
        before=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^( ]*\).*/\1/p')
    fi
    echo "$1" && scontrol requeue "$job" || return
    if [ -n "${3:-}" ]; then
        scontrol update JobId="$job" ExcNodeList="${before:+$before,}$3"
    fi
    if [ "$2" -gt 120 ]; then # Slurm holds a requeued job for two minutes anyway
        scontrol update JobId="$job" StartTime="now+$2"
    fi
}
# Exit code 75: saved because of a signal. Leave the rest to the next task of a chain, or requeue the job.
# Exit code 0: finished; drop the pending tasks of a chain.
finish() {
    code=$?
    set +evx
    if [ -e "$RPG_RESTART_FILE" ]; then
        read -r seconds nodes < "$RPG_RESTART_FILE"
        rm -f "$RPG_RESTART_FILE"
        if [ -n "$chain" ]; then # the next task goes on, without the nodes
            [ -z "$nodes" ] || scontrol update JobId="$chain" ExcNodeList="$nodes"
        else
            requeue "requeued" "$seconds" "$nodes"
        fi
    elif [ "$code" -eq 75 ] && [ -n "$chain" ]; then
        exit 0
    elif [ "$code" -eq 75 ]; then
        requeue "saved; requeued" 0
    elif [ "$code" -eq 0 ] && [ -n "$chain" ]; then
        scancel --state=PENDING "$chain"
    fi
    exit "$code"
}
trap finish EXIT
