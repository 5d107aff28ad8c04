#!/usr/bin/env bash
# Generates text for a file of prompts on the GPUs of several Slurm nodes, one process per node.
#
#   MODEL=DIR INPUT=prompts.jsonl OUTPUT=out.jsonl MESH=expert=8,tensor=2 sbatch --nodes=2 --gpus-per-node=8 scripts/slurm_generate.sh
#
# Model, input and output lie on a file system that all nodes see, or in copies of their own: only the first process
# writes. A node that is lost ends the job; the same command again goes on behind the last complete record.
#SBATCH --job-name=jaxspec-generate
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
set -euo pipefail
: "${MODEL:?directory of the model}" "${INPUT:?JSONL file of requests}" "${OUTPUT:?JSONL file}" "${MESH:?axes and sizes}"

srun --kill-on-bad-exit=1 jaxspec generate \
    --model "$MODEL" --input "$INPUT" --output "$OUTPUT" \
    --distributed --mesh "$MESH" ${ENGINE_FLAGS:-}
