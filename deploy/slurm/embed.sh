#!/bin/bash
# Embeds a large source in 16 parts: sbatch deploy/slurm/embed.sh
# Run it again to resume: each part makes only the files that are missing.
#SBATCH --job-name=kinlens-embed
#SBATCH --array=1-16
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --requeue
set -euo pipefail
exec kinlens-index embed /shop/images --bundle /shop/bundle --out /shop/vectors \
  --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
