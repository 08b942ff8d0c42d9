#!/bin/bash
# 2 nodes x 4 GPUs by srun: sbatch examples/batch/slurm_srun.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# What your cluster calls it; the MPI has to be the one that mpi4py uses (python -m cupy_coll doctor).
# module load mpich

cd "$SLURM_SUBMIT_DIR"
./mpi_launch.sh --ppn 4 examples/03_ddp_fsdp.py # as many ranks as there are tasks
