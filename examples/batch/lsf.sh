#!/bin/bash
# 2 nodes x 4 GPUs under LSF: bsub < examples/batch/lsf.sh
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -gpu "num=4"
#BSUB -W 00:30
#BSUB -o %J.out
set -euo pipefail

# module load mpich

cd "$LS_SUBCWD"
./mpi_launch.sh --ppn 4 examples/03_ddp_fsdp.py
