#!/bin/bash
# Submit with: sbatch slurm.sh experiments/digits.toml
#SBATCH --job-name=waffle
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@300
# GPUs: add  #SBATCH --gpus-per-task=4  and  --num-gpus="$SLURM_GPUS_PER_TASK"  below.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # a folder on the shared disk, with the environment .venv and the runs
source .venv/bin/activate
export WAFFLE_DATA="${WAFFLE_DATA:-$PWD/data}" WAFFLE_STATE_DIR="$PWD/.state" RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The command runs on the first node only; the others join its cluster and leave when it ends. The limit of minutes
# ends it before Slurm does, with all runs saved: submit the same job again to continue.
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" -- \
  waffle bench "$@" --on ray --minutes 230
