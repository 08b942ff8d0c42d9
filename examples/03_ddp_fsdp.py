"""./mpi_launch.sh -n 4 examples/03_ddp_fsdp.py

DDP and FSDP2 as torch's own documentation writes them; only the backend's name is new. Both train the same small model
on the same data and end at the same loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cupy_coll as cc

STEPS, BATCH = 30, 32


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))


def train(model: torch.nn.Module) -> tuple[float, float]:
    """First and last loss, averaged over the ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has its own data
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, 16, generator=generator)
        loss = (model(x) - x.sin().sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses[0], losses[-1]


def main() -> None:
    cc.init_torch()  # or torch.distributed.init_process_group("cupy_coll"), in a job that an MPI launcher started
    sharded = make_model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    results = {"DDP": train(DistributedDataParallel(make_model())), "FSDP2": train(sharded)}
    if dist.get_rank() == 0:
        for name, (first, last) in results.items():
            print(f"{name:<6}{dist.get_world_size()} ranks, {STEPS} steps: loss {first:.4f} -> {last:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
