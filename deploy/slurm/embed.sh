#!/bin/bash
# Embeds a large source in 16 parts: sbatch deploy/slurm/embed.sh
# Run it again to resume: each part makes only the files that are missing. To repeat some parts only:
# sbatch --array=3,7 deploy/slurm/embed.sh
#SBATCH --job-name=kinlens-embed
#SBATCH --array=1-16
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --requeue
set -euo pipefail
parts=16  # the last of --array; the same for each run into one --out
# Status 3: all files of the part exist, but images that cannot be read were skipped.
kinlens-index embed /shop/images --bundle /shop/bundle --out /shop/vectors \
  --part "$SLURM_ARRAY_TASK_ID/$parts" || test $? -eq 3
