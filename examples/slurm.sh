#!/bin/bash
# A trainer on the first node of a SLURM job, and on each other node a vLLM server that follows it.
#
#     sbatch --nodes=3 examples/slurm.sh CHECKPOINT [OPTION OF vllm serve]...
#
# docs/recipes.md explains this script. SHARED names a directory that all nodes see.
#SBATCH --job-name=dbuffer
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail

CHECKPOINT=${1:?give the directory of a checkpoint, which all nodes see}
shift
RUN=${SHARED:-$SLURM_SUBMIT_DIR}/dbuffer-$SLURM_JOB_ID
STORE=$RUN/policy
LOCAL=/dev/shm/dbuffer-$SLURM_JOB_ID

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
num_engines=$((${#hosts[@]} - 1))
((num_engines > 0)) || { echo "give two nodes or more" >&2; exit 2; }

# Runs on each engine's node. It restarts a server that died; the server then loads weights from its
# copy in memory (local_store).
serve() {
    trap 'rm -rf "$LOCAL"' EXIT
    trap 'kill "$server" && wait "$server"; exit 143' TERM
    while true; do
        vllm serve "$CHECKPOINT" --weight-transfer-config '{"backend": "dbuffer"}' \
            --additional-config "{\"dbuffer\": {\"store\": \"$STORE\", \"local_store\": \"$LOCAL\", \"timeout_s\": 600}}" \
            --middleware dbuffer.integrations.vllm.FollowStore "$@" &
        server=$! code=0
        wait "$server" || code=$?
        echo "$(hostname): vllm serve ended with $code, and is started again" >&2
        sleep 10
    done
}

finish() {
    trap - EXIT TERM
    scancel --signal=TERM "$SLURM_JOB_ID" || true # to the steps: for a signal to srun they would get SIGKILL
    rm -rf "$RUN" || true # remove the store first, because SLURM may kill this script in the wait
    wait
    rm -rf "$RUN"
}
trap finish EXIT
trap 'exit 143' TERM

mkdir -p "$RUN"
export CHECKPOINT STORE LOCAL
srun --nodes="$num_engines" --ntasks="$num_engines" --nodelist="$(IFS=,; echo "${hosts[*]:1}")" \
    --kill-on-bad-exit=0 bash -c "$(declare -f serve); serve \"\$@\"" serve "$@" &
# Replace this by your trainer, with torchrun if it has several ranks. With --data-parallel-size D,
# each server of a dense model has D receivers: then pass D times as many to --receivers.
srun --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
    python3 examples/trainer.py "$CHECKPOINT" "$STORE" --receivers "$num_engines" &
wait "$!"
