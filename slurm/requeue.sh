# Sourced by the job scripts beside it: the options of srun, and what happens to a job whose command has ended.

step=(--ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE")
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="${CONTAINER_MOUNTS:-$PWD:$PWD}"
        --container-workdir="$PWD")
fi
rpg=${RPG_MEGATRON:-rpg-megatron}

# Slurm signals the command as well, which saves and exits; this shell ignores signals and waits for it.
trap : TERM USR1
# The tasks of an array run one after another; each resumes where the last one stopped.
chain=${SLURM_ARRAY_JOB_ID:-}
# Exit code 75: saved because of a signal. Leave the rest to the next task of an array, or requeue the job,
# unless it is being cancelled. Exit code 0: finished; drop the pending tasks of an array.
finish() {
    code=$?
    set +evx
    if [ "$code" -eq 75 ] && [ -n "$chain" ]; then
        exit 0
    elif [ "$code" -eq 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "saved; requeued"
        scontrol requeue "$SLURM_JOB_ID"
    elif [ "$code" -eq 0 ] && [ -n "$chain" ]; then
        scancel --state=PENDING "$chain"
    fi
    exit "$code"
}
trap finish EXIT
