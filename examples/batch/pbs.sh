#!/bin/bash
# 2 nodes x 4 GPUs under PBS Pro: qsub examples/batch/pbs.sh
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l walltime=00:30:00
#PBS -j oe
set -euo pipefail

# module load mpich

cd "$PBS_O_WORKDIR"
./mpi_launch.sh --ppn 4 examples/03_ddp_fsdp.py # as many ranks as the node file has lines
