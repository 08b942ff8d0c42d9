"""Collectives by mode and log-probabilities from sharded logits, for jobs started by mpirun.

Importing this package starts neither MPI nor CUDA; :meth:`CommContext.init_distributed_env` does.
"""

from torch.distributed import ReduceOp

import cupy_coll_autoload
from cupy_coll.bridge import to_cupy, to_numpy, to_torch
from cupy_coll.collective import (
    all_gather,
    all_reduce,
    all_reduce_dict,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from cupy_coll.context import CommContext, CommMode, ParallelMode, initialize_distributed_env
from cupy_coll.errors import (
    ArgumentError,
    CommTimeoutError,
    CupyCollError,
    DTypeError,
    GroupError,
    MismatchError,
    NotInitializedError,
    PeerError,
    ShapeError,
    TransportError,
)
from cupy_coll.group import Group
from cupy_coll.logprob import (
    AllGatherCPTensor,
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    DistributedCrossEntropy,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
    distributed_vocab_topk,
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    gather_logits_at_global_indices,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
    tp_invariant,
    vocab_parallel_argmax,
    vocab_parallel_log_softmax,
    vocab_parallel_logprob_and_entropy,
)
from cupy_coll.regions import (
    all_to_all,
    gather_from_sequence_parallel_region,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
    scatter_to_sequence_parallel_region,
)
from cupy_coll.torch_backend import init_torch
from cupy_coll.transport.base import Work
from cupy_coll.uneven import all_to_all_uneven, gather_jagged_object_lists, rebalance_nd_tensor

__all__ = [
    "AllGatherCPTensor",
    "ArgumentError",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedLogprob",
    "CommContext",
    "CommMode",
    "CommTimeoutError",
    "CupyCollError",
    "DTypeError",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "Group",
    "GroupError",
    "MismatchError",
    "NotInitializedError",
    "ParallelMode",
    "PeerError",
    "ReduceOp",
    "ShapeError",
    "TransportError",
    "Work",
    "_compute_distributed_log_softmax",
    "_get_tokens_on_this_cp_rank",
    "all_gather",
    "all_reduce",
    "all_reduce_dict",
    "all_to_all",
    "all_to_all_uneven",
    "allgather_cp_sharded_tensor",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_jagged_object_lists",
    "gather_logits_at_global_indices",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "init_torch",
    "initialize_distributed_env",
    "rebalance_nd_tensor",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_to_sequence_parallel_region",
    "send",
    "to_cupy",
    "to_numpy",
    "to_torch",
    "tp_invariant",
    "vocab_parallel_argmax",
    "vocab_parallel_log_softmax",
    "vocab_parallel_logprob_and_entropy",
]

cupy_coll_autoload.register()
