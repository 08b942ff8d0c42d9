"""./mpi_launch.sh -n 4 examples/02_dtensor_logprobs.py [--backend gloo]

Log-probabilities of logits that are a DTensor: the vocabulary is split over "tp", the batch over "dp". No MASTER_ADDR,
no RANK: the ranks meet over MPI, also for gloo. The numbers are the same with either backend.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cupy_coll as cc

BATCH, LENGTH, HIDDEN, VOCABULARY = 2, 16, 32, 1003  # a vocabulary that no number of ranks divides


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probabilities of DTensor logits.")
    parser.add_argument("--backend", default="cupy_coll", choices=["cupy_coll", "gloo"])
    backend = parser.parse_args().backend
    context = cc.CommContext()
    context.init_distributed_env()
    dist.init_process_group(backend)
    size = dist.get_world_size()
    dp = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(mesh.get_local_rank("dp"))  # each data-parallel rank has its own batch
    hidden = torch.randn(BATCH, LENGTH, HIDDEN)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    torch.manual_seed(100)  # one output layer, split by columns
    head = torch.nn.Parameter(distribute_tensor(torch.randn(HIDDEN, VOCABULARY) / HIDDEN**0.5, mesh["tp"], [Shard(1)]))

    logits = distribute_tensor(hidden, mesh["tp"], [Replicate()]) @ head
    logprobs = cc.get_logprobs_from_vocab_parallel_logits(logits, tokens)
    (-logprobs.mean()).backward()
    cc.all_reduce(head.grad.to_local(), mesh["dp"], cc.ReduceOp.AVG)  # a dimension of a mesh is a group

    whole = (hidden.double() @ head.detach().full_tensor().double()).log_softmax(-1)
    expected = whole[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    worst = (logprobs.detach() - expected).abs().max().item()
    norm = head.grad.full_tensor().norm().item()
    if dist.get_rank() == 0:
        print(f"{size} ranks, dp {dp} x tp {size // dp}, {dist.get_backend()}: mean {logprobs.mean().item():.6f}")
        print(f"norm of the gradient {norm:.6f}; at most {worst:.1e} from unsharded float64")
    dist.destroy_process_group()
    context.destroy()


if __name__ == "__main__":
    main()
