#!/usr/bin/env bash
# A training run as a Slurm job. Submit it from the repository's folder; its flags are those of train_grpo.py:
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
# Five minutes before the end of the job SIGTERM stops the run. It is saved up to its last update (exit code 130), and
# the rollout under way is lost. To lose nothing give --max-hours, less than --time by what one update takes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# exec: the program takes the shell's place, so the signal reaches it.
exec .venv/bin/python train_grpo.py "$@"
