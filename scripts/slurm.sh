#!/usr/bin/env bash
# A training run as a Slurm job. Submit it from the repository's folder, with flags of train_grpo.py:
#   sbatch scripts/slurm.sh --task-id 0
#   sbatch scripts/slurm.sh --resume runs/RUN                            # continue in another job
#   sbatch --gpus=8 --cpus-per-task=80 --mem=400G scripts/slurm.sh --task-id 0 --data-parallel
#   sbatch --gpus=0 --cpus-per-task=2 --mem=8G scripts/slurm.sh --preset tiny     # the small policy, without a GPU
#SBATCH --job-name=vla-grpo
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=10
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# Five minutes before the end of the job SIGTERM stops the run (exit code 130). The run is saved up to its last update;
# the rollout in progress is lost. To lose nothing, add --max-hours: the hours of --time minus those of one update.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# If Slurm puts a job back into its queue (a node failed, another job needed it), this script starts again with the same
# flags. Then the job goes on with its run, whose folder is in the output so far.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    run=$(sed -n 's/^run folder *//p' "$(readlink "/proc/$$/fd/1")" | tail -n 1)
    [ -z "$run" ] || set -- --resume "$run"
fi
# exec replaces this shell by the program, so that the signal reaches the program.
exec .venv/bin/python train_grpo.py "$@"
