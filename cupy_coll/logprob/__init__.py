"""Log-probabilities and entropy from logits whose vocabulary is split over ranks."""

from cupy_coll.logprob.autograd import (
    ChunkedDistributedEntropy,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    vocab_parallel_logprob_and_entropy,
)
from cupy_coll.logprob.context_parallel import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
)
from cupy_coll.logprob.partials import tp_invariant
from cupy_coll.logprob.sequences import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "_compute_distributed_log_softmax",
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_tensor",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "tp_invariant",
    "vocab_parallel_logprob_and_entropy",
]
