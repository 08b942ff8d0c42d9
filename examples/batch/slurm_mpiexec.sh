#!/bin/bash
# 2 nodes x 4 GPUs by mpiexec inside the allocation, where srun has no PMI for your MPI: sbatch examples/batch/slurm_mpiexec.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# module load openmpi

cd "$SLURM_SUBMIT_DIR"
./mpi_launch.sh --launcher mpiexec --ppn 4 examples/03_ddp_fsdp.py
