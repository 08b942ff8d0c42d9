"""Log-probabilities and entropy from logits whose vocabulary is split over ranks."""

from cupy_coll.logprob.autograd import (
    ChunkedDistributedEntropy,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    vocab_parallel_logprob_and_entropy,
)
from cupy_coll.logprob.partials import tp_invariant
from cupy_coll.logprob.sequences import from_parallel_logits_to_logprobs

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "_compute_distributed_log_softmax",
    "from_parallel_logits_to_logprobs",
    "tp_invariant",
    "vocab_parallel_logprob_and_entropy",
]
