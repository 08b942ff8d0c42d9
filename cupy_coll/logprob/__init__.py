"""Log-probabilities and entropy from logits whose vocabulary is split over ranks."""

from cupy_coll.logprob.autograd import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    vocab_parallel_logprob_and_entropy,
)
from cupy_coll.logprob.context_parallel import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
)
from cupy_coll.logprob.dtensor import (
    dtensor_from_parallel_logits_to_logprobs,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from cupy_coll.logprob.partials import tp_invariant
from cupy_coll.logprob.sequences import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
)
from cupy_coll.logprob.vocab_parallel import (
    DistributedCrossEntropy,
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    vocab_parallel_argmax,
    vocab_parallel_log_softmax,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedLogprob",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "_compute_distributed_log_softmax",
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "tp_invariant",
    "vocab_parallel_argmax",
    "vocab_parallel_log_softmax",
    "vocab_parallel_logprob_and_entropy",
]
