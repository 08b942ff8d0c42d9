"""Log-probabilities of DTensors on meshes of torch's gloo, whose groups are matched by their ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cupy_coll as cc

B, S = 2, 8


@pytest.fixture
def gloo(world, share, tmp_path_factory) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = share(str(tmp_path_factory.mktemp("store") / "file"))[0]
    dist.init_process_group("gloo", store=dist.FileStore(path, world.size), rank=world.rank, world_size=world.size)
    yield
    cc.barrier(world)
    dist.destroy_process_group()
    gc.collect()  # meshes refer to themselves, and gloo's threads end with them


def meshes(size: int) -> list[dict[str, int]]:
    found = [{"tp": size}]
    if size % 2 == 0:
        found += [{"cp": 2, "tp": size // 2}, {"dp": 2, "cp": 1, "tp": size // 2}]
    if size == 4:
        found += [{"dp": 2, "cp": 2, "tp": 1}, {"dp": 1, "cp": 2, "tp": 2}]
    return found


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """A mesh, and our groups of the same ranks; called by all ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    cc.CommContext().init_mesh(**{f"t_{axis}": size for axis, size in axes.items()})
    return mesh


def draw(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(B, S, vocab, generator=generator) * 5).to(dtype)
    return logits, torch.randint(0, vocab, (B, S), generator=generator)


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 24), (torch.bfloat16, 23)], ids=["even", "uneven bf16"])
def test_values_and_gradients(gloo, world, size, expect, dtype, vocab):
    logits, tokens = draw(vocab, dtype)
    wide = logits.double().requires_grad_()
    value = torch.log_softmax(wide, -1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    upstream = torch.linspace(-1, 2, B * (S - 1)).view(B, S - 1)
    gradient = torch.autograd.grad(value, wide, upstream.double())[0]
    rounding = 2**-7 if dtype == torch.bfloat16 else 0.0
    # Position i of the tensor is position seq_index[i] of the sequence: balanced for attention, and any other.
    seq_index = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5] if vocab == 24 else [3, 7, 0, 5, 1, 6, 2, 4])
    for axes in meshes(size):
        mesh = mesh_of(axes)
        split = axes.get("cp", 1) > 1
        order = seq_index if split else torch.arange(S)
        placements = [
            {"tp": Shard(2), "cp": Shard(1) if split else Replicate()}.get(name, Replicate()) for name in axes
        ]
        whole = logits[:, order].clone().requires_grad_()
        sharded = distribute_tensor(whole.detach(), mesh, placements).requires_grad_()
        targets: list[Any] = [DTensor.from_local(tokens[:, order], mesh, [Replicate()] * len(axes), run_check=False)]
        if split:
            at_cp = [Shard(1) if name == "cp" else Replicate() for name in axes]
            targets.append(distribute_tensor(tokens[:, order], mesh, at_cp))
        else:
            targets.append(tokens)
        for target in targets:
            for chunk in (None, 3):
                sharded.grad = None
                got = cc.get_logprobs_from_vocab_parallel_logits(
                    sharded, target, order if split else None, chunk_size=chunk
                )
                expect(got.detach().double(), value.detach(), f"{axes}", rtol=1e-5, atol=1e-6)
                got.backward(upstream)
                expected = distribute_tensor(gradient[:, order], mesh, placements).to_local()
                grad = sharded.grad.to_local().double()
                expect(grad, expected, f"gradient on {axes}", rtol=1e-5 + rounding, atol=1e-6)
                with torch.no_grad():
                    free = cc.get_logprobs_from_vocab_parallel_logits(sharded, target, order if split else None)
                expect(free.requires_grad, False)
        local = sharded.to_local().detach().requires_grad_()
        step = -(-vocab // axes["tp"])
        first = min(mesh.get_local_rank("tp") * step, vocab)
        got = cc.dtensor_from_parallel_logits_to_logprobs(
            local,
            targets[0],
            first,
            min(first + step, vocab),
            mesh.get_group("tp"),
            seq_index=order if split else None,
        )
        expect(got.detach().double(), value.detach(), "by range", rtol=1e-5, atol=1e-6)
        got.backward(upstream)
        expect(local.grad, sharded.grad.to_local(), "the same gradient")
        if not split:
            nextlp = cc.get_next_token_logprobs_from_logits(tokens, sharded)
            expect(nextlp.detach().double(), value.detach(), "next tokens", rtol=1e-5, atol=1e-6)


def test_errors(gloo, world, size, raises_everywhere):
    call = cc.get_logprobs_from_vocab_parallel_logits
    logits, tokens = draw(24, torch.float32)
    mesh = mesh_of({"tp": size})
    with raises_everywhere(cc.ArgumentError, "vocab_parallel_logits is a Tensor, expected a DTensor"):
        call(logits, tokens)
    sharded = distribute_tensor(logits, mesh, [Shard(2)])
    with raises_everywhere(cc.ArgumentError, r"seq_index is given, but the mesh .* no dimension 'cp'"):
        call(sharded, tokens, torch.arange(S))
    with raises_everywhere(cc.ShapeError, "target has 7 positions, expected the 8"):
        call(sharded, tokens[:, :7])
    if size > 1:
        with raises_everywhere(cc.ArgumentError, r"placement .* over 'tp', expected Shard\(2\)"):
            call(distribute_tensor(logits, mesh, [Replicate()]), tokens)
    other = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    with raises_everywhere(cc.ArgumentError, r"the mesh .* has dimensions \('cp',\), expected one 'tp'"):
        call(distribute_tensor(logits, other, [Shard(1)]), tokens)
    if size == 2:
        both = mesh_of({"cp": 2, "tp": 1})
        half = distribute_tensor(logits, both, [Shard(1), Shard(2)])
        whole = DTensor.from_local(tokens, both, [Replicate()] * 2, run_check=False)
        with raises_everywhere(cc.ArgumentError, "seq_index is None"):
            call(half, whole)
        with raises_everywhere(cc.ArgumentError, "expected each of 0 to 7 once"):
            call(half, whole, torch.zeros(S, dtype=torch.int64))
