#!/usr/bin/env bash
# A training run as a Slurm job, submitted from the repository's folder; flags are train_grpo.py's:
#   sbatch scripts/slurm.sh --task-id 0 --num-envs 8
#   sbatch scripts/slurm.sh --resume runs/RUN                            # go on in another job
#   sbatch --gpus=8 --cpus-per-task=80 --mem=400G scripts/slurm.sh --task-id 0 --num-envs 8 --data-parallel --batch-size 32
#SBATCH --job-name=vla-grpo
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=10
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slurm-%j.out
# Five minutes before the end SIGTERM stops the run, which is saved up to its last update (exit code 130). Without loss
# of the rollout under way it ends by --max-hours, if that is less than --time by as much as one update takes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# exec: the program takes the shell's place, so the signal reaches it.
exec .venv/bin/python train_grpo.py "$@"
