"""The names, signatures and error classes that users rely on; and what importing does."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time

import pytest
import torch

import cupy_coll as cc

REQUIRED = inspect.Parameter.empty

# Parameters in order with their defaults; what follows a "*" is keyword-only.
SIGNATURES = {
    "scatter": "tensor, comm_mode, scatter_list=None, src=0, async_op=False, *, group_src=None",
    "broadcast": "tensor, comm_mode, src=0, async_op=False, *, group_src=None",
    "broadcast_object_list": "object_list, comm_mode, src=0, *, group_src=None",
    "gather": "tensor, comm_mode, gather_list=None, dst=0, async_op=False, *, group_dst=None",
    "all_gather": "output_tensor, input_tensor, comm_mode, async_op=False",
    "all_reduce": "tensor, comm_mode, op=SUM, async_op=False",
    "all_reduce_dict": "dictionary, comm_mode, op=SUM, dtype=float32",
    "all_to_all": "input_, gather_dim, scatter_dim, group",
    "scatter_to_sequence_parallel_region": "input_, rank0_only=True",
    "gather_from_sequence_parallel_region": "input_, rank0_only=True",
    "barrier": "comm_mode='GLOBAL'",
    "reduce": "tensor, comm_mode, dst=0, op=SUM, async_op=False, *, group_dst=None",
    "reduce_scatter": "output_tensor, input_tensor, comm_mode, op=SUM, async_op=False",
    "send": "tensor, dst, comm_mode, async_op=False, *, group_dst=None",
    "recv": "tensor, src, comm_mode, async_op=False, *, group_src=None",
    "all_to_all_uneven": "input_, input_splits, output_splits, group",
    "to_torch": "array",
    "to_cupy": "array",
    "to_numpy": "array",
    "initialize_distributed_env": "rank, world_size, backend='nccl', dist_url='env://', timeout=1800",
    "rebalance_nd_tensor": "tensor, group=None",
    "gather_jagged_object_lists": "local_objects, group=None",
    "group_all_reduce_sum_with_grad": "x, group",
    "group_all_reduce_sum": "x, group",
    "distributed_vocab_topk": (
        "vocab_parallel_logits, k, tp_group, *, vocab_start_index, vocab_end_index, chunk_size=None"
    ),
    "gather_logits_at_global_indices": (
        "vocab_parallel_logits, global_indices, tp_group=None, cp_group=None, *, vocab_start_index, vocab_end_index, "
        "chunk_size=None"
    ),
    "vocab_parallel_log_softmax": "logits, temperature, *, tp_group=None",
    "vocab_parallel_argmax": "logits, *, tp_group=None",
    "cp_shift_next": "x, cp_group=None, *, fill",
    "cp_load_balanced_to_contiguous": "x, *, cp_group=None, seq_dim=1",
    "get_next_token_logprobs_from_logits": (
        "input_ids, next_token_logits, seq_index=None, vocab_parallel_rank=None, vocab_parallel_group=None, "
        "context_parallel_group=None, sampling_params=None, chunk_size=None"
    ),
    "get_logprobs_from_vocab_parallel_logits": (
        "vocab_parallel_logits, input_ids, seq_index=None, chunk_size=None, *, temperature=1.0"
    ),
    "dtensor_from_parallel_logits_to_logprobs": (
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, "
        "seq_index=None, chunk_size=None, *, temperature=1.0"
    ),
    "init_torch": "comm=None, *, timeout=1800",
}

METHODS = {
    "is_initialized": "",
    "init_distributed_env": (
        "world_size=None, rank=None, backend='nccl', dist_url='env://', timeout=1800, *, comm=None"
    ),
    "init_group": "ranks, mode=None, backend='nccl', use_cpu=False",
    "get_group": "comm_mode",
    "get_world_size": "comm_mode",
    "get_global_rank": "",
    "get_local_rank": "comm_mode",
    "get_in_node_rank": "",
    "get_local_world_size": "",
    "get_ranks_in_group": "comm_mode",
    "get_intra_node_process_group": "",
    "get_inter_node_process_group": "",
    "is_main_rank": "",
    "destroy": "",
}


def parts(signature: str) -> list[tuple[str, object, bool]]:
    """(name, default, keyword-only) of each parameter of a signature as written above."""
    names = {"SUM": torch.distributed.ReduceOp.SUM, "float32": torch.float32}
    result, keyword_only = [], False
    for part in filter(None, signature.split(", ")):
        if part == "*":
            keyword_only = True
            continue
        name, _, default = part.partition("=")
        result.append((name, eval(default, names) if default else REQUIRED, keyword_only))
    return result


def check_signature(function: object, signature: str) -> None:
    actual = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    wanted = parts(signature)
    assert [p.name for p in actual][: len(wanted)] == [name for name, _, _ in wanted]
    assert all(p.kind == p.KEYWORD_ONLY for p in actual[len(wanted) :])  # what is ours besides
    for parameter, (name, default, keyword_only) in zip(actual, wanted, strict=False):
        assert (parameter.kind == parameter.KEYWORD_ONLY) == keyword_only, name
        if default is not REQUIRED:  # a parameter that must be given in the reference may have a default here
            assert parameter.default == default, name


@pytest.mark.parametrize("function", SIGNATURES)
def test_functions(function: str) -> None:
    assert function in cc.__all__
    check_signature(getattr(cc, function), SIGNATURES[function])


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_the_context(method: str) -> None:
    check_signature(getattr(cc.CommContext(), method), METHODS[method])


def test_all_is_complete() -> None:
    assert len(set(cc.__all__)) == len(cc.__all__)
    for name in cc.__all__:
        assert hasattr(cc, name), name
    public = {name for name, value in vars(cc).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public <= set(cc.__all__)
    assert cc.ReduceOp is torch.distributed.ReduceOp


@pytest.mark.parametrize("name", [name for name in cc.__all__ if inspect.isfunction(getattr(cc, name))])
def test_docstrings_and_hints(name: str) -> None:
    """The first line is a sentence of its own; every parameter and the result has a type."""
    function = getattr(cc, name)
    lines = inspect.getdoc(function).splitlines()
    assert lines[0].endswith("."), lines[0]
    assert len(lines) == 1 or not lines[1]
    signature = inspect.signature(function)
    assert signature.return_annotation is not REQUIRED
    assert all(parameter.annotation is not REQUIRED for parameter in signature.parameters.values())


def test_error_classes() -> None:
    bases = {
        cc.CupyCollError: (Exception,),
        cc.ArgumentError: (cc.CupyCollError, ValueError),
        cc.ShapeError: (cc.ArgumentError,),
        cc.DTypeError: (cc.ArgumentError,),
        cc.GroupError: (cc.ArgumentError,),
        cc.NotInitializedError: (cc.CupyCollError, RuntimeError, KeyError),
        cc.MismatchError: (cc.CupyCollError,),
        cc.CommTimeoutError: (cc.CupyCollError,),
        cc.PeerError: (cc.CupyCollError,),
        cc.TransportError: (cc.CupyCollError,),
    }
    for error, parents in bases.items():
        assert all(issubclass(error, parent) for parent in parents), error
        assert str(error("its words")) == "its words"
    assert not issubclass(cc.MismatchError, cc.ArgumentError)
    assert cc.PeerError("gone", (3,)).ranks == (3,)
    failure = cc.TransportError("failed", 7, "its text")
    assert (failure.code, failure.text) == (7, "its text")


def test_group_is_no_process_group() -> None:
    assert not issubclass(cc.Group, torch.distributed.ProcessGroup)
    assert issubclass(cc.Work, torch.distributed.Work)


def run(code: str) -> str:
    """What a fresh interpreter prints, started without any launcher's variables and without mpiexec on PATH."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/nonexistent", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_starts_nothing() -> None:
    """No MPI, no CUDA, no CuPy; nor does it need CuPy to be there."""
    code = """
import sys
sys.modules["cupy"] = None  # importing it fails from now on
import cupy_coll, torch
started = "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized()
print(started, torch.cuda.is_initialized(), cupy_coll.CommContext().is_initialized())
"""
    assert run(code).split() == ["False", "False", "False"]


def test_an_import_by_a_worker_process() -> None:
    """A data loader's worker imports the package in a process that MPI has not started."""
    code = """
import multiprocessing, torch
def work(queue):
    import cupy_coll
    queue.put(cupy_coll.to_torch(__import__("numpy").ones(2)).tolist())
context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=work, args=(queue,))
worker.start()
print(queue.get(timeout=50))
worker.join()
"""
    begin = time.monotonic()
    assert run(code).strip() == "[1.0, 1.0]"
    assert time.monotonic() - begin < 60
