"""./mpi_launch.sh -n 4 examples/01_policy_step.py

Post-train a small language model on a few MPI ranks.

The text is real: the source of the Python standard library of the machine it runs on. The model (embedding, GRU,
output layer over 16,384 lexemes) first learns to predict the next lexeme. Then it gets the beginnings of real lines,
writes the rest, and is rewarded where Python's own parser accepts the line (REINFORCE).

The ranks form a mesh, data parallel x tensor parallel. Every rank holds the embedding and the GRU. The output layer's
rows, the vocabulary, are split over the tensor-parallel ranks: no rank ever sees a whole row of logits. Data-parallel
ranks take different sequences and prompts. What travels between the ranks:

  broadcast, broadcast_object_list   text, vocabulary and first weights, from rank 0
  all_reduce                         gradients: the hidden state's over TP, the parameters' over DP
  from_parallel_logits_to_logprobs   log-probabilities from split logits, with one small message
  all_gather                         sampling: each TP rank's best candidate
  gather_jagged_object_lists         the rollouts of all DP ranks, lists of different lengths
  rebalance_nd_tensor                what is known of each rollout; each rank has another number of them
  all_reduce_dict                    metrics

At the end a batch's log-probabilities are computed again without the split; the job fails where they differ.
The same seed on the same layout gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from matplotlib.figure import Figure
from stdlib_text import Corpus, reward_of
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from cupy_coll import (
    CommContext,
    ParallelMode,
    ReduceOp,
    all_gather,
    all_reduce,
    all_reduce_dict,
    broadcast,
    broadcast_object_list,
    from_parallel_logits_to_logprobs,
    gather_jagged_object_lists,
    rebalance_nd_tensor,
)

GLOBAL, DP, TP = ParallelMode.GLOBAL, ParallelMode.DATA_PARALLEL, ParallelMode.TENSOR_PARALLEL

VOCABULARY, WIDTH = 16_384, 128
BATCH, CONTEXT = 16, 32  # sequences in a supervised step, all ranks together; lexemes predicted in each
PROMPTS, ROLLOUTS, LONGEST = 16, 4, 12  # prompts in a policy step; completions of each; lexemes in a completion
SUPERVISED_RATE, POLICY_RATE, WARM_UP, CLIP = 5e-3, 1e-3, 20, 1.0
NOISE_TILE = 1024  # columns of the vocabulary that share a stream of sampling noise
IGNORED = -100  # a target that counts for nothing
TOLERANCE = 1e-5


class CommunicationTimer:
    """Adds up the time inside ``with`` blocks around communication, waiting for the other ranks included.

    The log-probability calls are left out: from outside, their one message cannot be told from their arithmetic.
    """

    seconds = 0.0

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *_) -> None:
        self.seconds += time.perf_counter() - self.begin


communication = CommunicationTimer()


class Layout:
    """Where this rank stands in the mesh; columns ``start`` to ``end`` of the vocabulary are its own."""

    def __init__(self, context: CommContext, vocabulary: int) -> None:
        self.dp, self.dp_rank = context.get_world_size(DP), context.get_local_rank(DP)
        self.tp, self.tp_rank = context.get_world_size(TP), context.get_local_rank(TP)
        self.start, self.end = (vocabulary * rank // self.tp for rank in (self.tp_rank, self.tp_rank + 1))

    def share(self, count: int) -> range:
        """Which of ``count`` things are this data-parallel rank's."""
        return range(count * self.dp_rank // self.dp, count * (self.dp_rank + 1) // self.dp)


def share_corpus(context: CommContext) -> Corpus:
    """Rank 0 reads the text; the others get it."""
    corpus, header = None, [None]
    if context.is_main_rank():
        corpus = Corpus.read(VOCABULARY)
        header = [(corpus.lexemes, len(corpus.tokens))]
    with communication:
        broadcast_object_list(header, GLOBAL)
        lexemes, length = header[0]
        tokens = corpus.tokens if corpus else torch.empty(length, dtype=torch.int64)
        broadcast(tokens, GLOBAL)
    return corpus or Corpus(lexemes, tokens)


# ------------------------------------------------------------------------------------------------------------ model


class SumGradientOverTP(torch.autograd.Function):
    """Forward: the identity. Backward: the gradient, summed over the tensor-parallel ranks.

    It stands before the split output layer: each rank knows only what its own columns want of the hidden state.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        with communication:
            all_reduce(total, TP)
        return total


class LanguageModel(nn.Module):
    """Embedding, GRU, and this rank's rows of the output layer, whose bias starts at the log unigram frequencies."""

    def __init__(self, corpus: Corpus, layout: Layout, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layout = layout
        self.embedding = nn.Embedding(len(corpus.lexemes), WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        whole_head = nn.Linear(WIDTH, len(corpus.lexemes))
        whole_head.bias.data = (corpus.counts / corpus.counts.sum()).log()
        with communication:
            for parameter in (*self.parameters(), *whole_head.parameters()):
                broadcast(parameter.detach(), GLOBAL)
        self.head_weight = nn.Parameter(whole_head.weight.detach()[layout.start : layout.end].clone())
        self.head_bias = nn.Parameter(whole_head.bias.detach()[layout.start : layout.end].clone())

    def hidden(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        """tokens [rows, length], state before them [rows, WIDTH] -> [rows, length, WIDTH]."""
        return self.gru(self.embedding(tokens), None if state is None else state[None])[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., WIDTH] -> this rank's columns, [..., end - start]."""
        return F.linear(SumGradientOverTP.apply(hidden), self.head_weight, self.head_bias)

    def logprobs(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of targets[:, 1:], each after the tokens before it: [rows, length - 1]."""
        logits = self.logits(self.hidden(tokens))
        return from_parallel_logits_to_logprobs(logits, targets, self.layout.start, self.layout.end, TP)


@torch.no_grad()
def largest_difference(model: LanguageModel, tokens: Tensor) -> float:
    """Largest difference on any rank between the log-probabilities and those of the unsplit output layer.

    Those are the float64 log-softmax of its float32 logits. (Its float64 logits would change them by up to 7e-6, seen
    after 120 policy steps: that is the rounding of a float32 output layer, split or not.)
    """
    split = model.logprobs(tokens, tokens)
    weight = rebalance_nd_tensor(model.head_weight.detach(), TP)  # [vocabulary, WIDTH]
    bias = rebalance_nd_tensor(model.head_bias.detach(), TP)
    whole = torch.empty_like(split, dtype=torch.float64)
    for row, sequence in enumerate(tokens):  # one by one, for the memory's sake
        logits = F.linear(model.hidden(sequence[None, :-1])[0], weight, bias).double()
        whole[row] = logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]
    largest = {"difference": (split - whole).abs().max()}
    return all_reduce_dict(largest, GLOBAL, ReduceOp.MAX, torch.float64)["difference"]


# --------------------------------------------------------------------------------------------------------- sampling


def gumbel_noise(layout: Layout, prompts: range, seed: int, step: int, position: int) -> Tensor:
    """Noise for this rank's columns: [prompts * ROLLOUTS, end - start].

    Addressed, not drawn in turn: a value depends on seed, step, position, prompt, rollout and column alone. So a lexeme
    is drawn with the same noise whichever ranks hold its prompt and its column.
    """
    first = layout.start // NOISE_TILE
    tiles = range(first, -(-layout.end // NOISE_TILE))
    noise = np.empty((len(prompts), ROLLOUTS, len(tiles), NOISE_TILE), np.float32)
    for row, prompt in enumerate(prompts):
        for column, tile in enumerate(tiles):
            stream = np.random.Philox(counter=[0, position, prompt, tile], key=[seed, step])
            draws = np.random.Generator(stream).standard_exponential((ROLLOUTS, NOISE_TILE), np.float32)
            noise[row, :, column] = np.maximum(draws, 2.0**-25)  # one float32 draw in 2**23 is 0
    noise = torch.from_numpy(noise).flatten(0, 1).flatten(1)[:, layout.start - first * NOISE_TILE :]
    return -noise[:, : layout.end - layout.start].log()


def draw(logits: Tensor, noise: Tensor, layout: Layout) -> Tensor:
    """Sample from the softmax over all ranks' columns without bringing them together: [rows].

    The column with the largest logit + Gumbel noise is such a sample, and it is the best of the ranks' best. Each rank
    sends a pair of float64 a row, which holds a column's number exactly.
    """
    best, column = (logits + noise).max(-1)
    candidate = torch.stack([best.double(), (column + layout.start).double()], -1)
    candidates = candidate.new_empty(layout.tp, *candidate.shape)  # [tp, rows, 2]
    with communication:
        all_gather(candidates, candidate, TP)
    winner = candidates[..., 0].argmax(0, keepdim=True)
    return candidates[..., 1].gather(0, winner)[0].long()


@torch.no_grad()
def complete(
    model: LanguageModel, prompts: list[list[int]], newline: int, noise_at: Callable[[int], Tensor]
) -> list[list[int]]:
    """ROLLOUTS completions of each prompt, prompt by prompt: up to their NEWLINE, at most LONGEST lexemes."""
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    state = model.hidden(padded(prompts))[torch.arange(len(prompts)), last].repeat_interleave(ROLLOUTS, 0)
    columns: list[Tensor] = []
    for position in range(LONGEST):
        columns.append(draw(model.logits(state), noise_at(position), model.layout))
        state = model.hidden(columns[-1][:, None], state)[:, 0]
    completions = torch.stack(columns, 1).tolist()
    return [line[: line.index(newline) + 1] if newline in line else line for line in completions]


def padded(rows: list[list[int]]) -> Tensor:
    """Lists of different lengths as one tensor, zeros after each."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


# --------------------------------------------------------------------------------------------------------- training


class Training:
    """One rank's part of the training.

    Losses are this rank's part of a mean over all ranks, so that gradients are summed.
    """

    def __init__(self, corpus: Corpus, model: LanguageModel, seed: int) -> None:
        self.corpus, self.model, self.layout, self.seed = corpus, model, model.layout, seed
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.draws = torch.Generator().manual_seed(seed)  # of sequences and prompts, the same ones on all ranks
        self.norms: list[float] = []  # of the gradients, before clipping
        self.samples: list = []  # ((prompt, completion), reward) of this rank's last rollouts

    def batch(self) -> Tensor:
        """This rank's part of BATCH random pieces of the text: [sequences, CONTEXT + 1]."""
        starts = torch.randint(len(self.corpus.tokens) - CONTEXT, (BATCH, 1), generator=self.draws)
        return self.corpus.tokens[starts[self.layout.share(BATCH)] + torch.arange(CONTEXT + 1)]

    def supervised_step(self, step: int, steps: int) -> tuple[float, int]:
        """Learn to predict the next lexeme; returns the loss and the number of lexemes, of all ranks."""
        tokens = self.batch()
        loss = -self.model.logprobs(tokens, tokens).sum() / (BATCH * CONTEXT)
        loss.backward()
        warm_up, decay = (step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP)
        self.update(SUPERVISED_RATE * min(1.0, warm_up, decay))
        with communication:
            return all_reduce_dict({"loss": loss.item()}, DP)["loss"], BATCH * CONTEXT

    def policy_step(self, step: int, steps: int) -> tuple[float, int]:
        """Complete lines and learn from what the parser says; returns mean reward and lexemes written, of all ranks."""
        lines = [self.corpus.draw_line(self.draws) for _ in range(PROMPTS)]
        cuts = [int(torch.randint(2, len(line) - 1, (), generator=self.draws)) for line in lines]
        mine = self.layout.share(PROMPTS)
        prompts = [[self.corpus.newline, *lines[i][: cuts[i]]] for i in mine]  # a line begins after a NEWLINE
        noise_at = partial(gumbel_noise, self.layout, mine, self.seed, step)
        completions = complete(self.model, prompts, self.corpus.newline, noise_at)
        prompts = [prompt for prompt in prompts for _ in range(ROLLOUTS)]

        texts = [(self.corpus.text(p[1:]), self.corpus.text(c)) for p, c in zip(prompts, completions, strict=True)]
        rewards = torch.tensor([reward_of(prompt + completion) for prompt, completion in texts])
        self.samples = list(zip(texts, rewards.tolist(), strict=True))
        by_prompt = rewards.view(-1, ROLLOUTS)
        self.reinforce(prompts, completions, (by_prompt - by_prompt.mean(1, keepdim=True)).flatten())
        sums = {"reward": rewards.sum(), "lexemes": sum(map(len, completions))}
        with communication:
            sums = all_reduce_dict(sums, DP)
        return sums["reward"] / (PROMPTS * ROLLOUTS), int(sums["lexemes"])

    def reinforce(self, prompts: list[list[int]], completions: list[list[int]], advantages: Tensor) -> None:
        """Raise the log-probability of each completion by its advantage.

        Rollouts without an advantage (all of a prompt did equally well) teach nothing and are dropped, which leaves the
        ranks with different numbers of them. So they are brought together and dealt out again, the longest first.
        """
        kept = advantages.nonzero()[:, 0]
        facts = torch.stack([advantages, torch.tensor([float(len(prompt)) for prompt in prompts])], 1)[kept]
        with communication:
            rollouts = gather_jagged_object_lists([prompts[i] + completions[i] for i in kept.tolist()], DP)
            facts = rebalance_nd_tensor(facts, DP)  # [rollouts of all ranks, 2]
        if not rollouts:
            return
        longest_first = sorted(range(len(rollouts)), key=lambda index: -len(rollouts[index]))
        mine = longest_first[self.layout.dp_rank :: self.layout.dp]
        if mine:
            tokens = padded([rollouts[index] for index in mine])
            lengths = torch.tensor([[len(rollouts[index])] for index in mine])
            advantage, prompt_length = facts[mine].split(1, dim=1)  # [rollouts, 1] each
            column = torch.arange(tokens.shape[1])
            targets = tokens.where((column >= prompt_length) & (column < lengths), IGNORED)
            loss = -(advantage * self.model.logprobs(tokens, targets)).sum() / (PROMPTS * ROLLOUTS)
            loss.backward()
        self.update(POLICY_RATE)

    def update(self, rate: float) -> None:
        """Sum the gradients over the data-parallel ranks, clip their norm, and step."""
        model = self.model
        parameters = [model.head_weight, model.head_bias, *model.embedding.parameters(), *model.gru.parameters()]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]  # None: had no rollouts
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with communication:
            all_reduce(flat, DP)
        # The norm of the whole model's gradient: each TP rank has a part of the output layer's and all of the rest.
        head_size = model.head_weight.numel() + model.head_bias.numel()
        square = flat[:head_size].square().sum()
        with communication:
            all_reduce(square, TP)
        norm = (square + flat[head_size:].square().sum()).sqrt()
        flat *= (CLIP / norm).clamp(max=1.0)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.norms.append(norm.item())


class Phase:
    """Runs one phase of the training, showing its progress, and keeps what it did, all ranks together."""

    def __init__(self, title: str, value: str, step_function: Callable, steps: int, context: CommContext) -> None:
        self.title, self.value = title, value
        self.history: list[float] = []
        self.tokens = 0
        begin, communicated = time.perf_counter(), communication.seconds
        with tqdm(total=steps, desc=title, mininterval=0.5, disable=not context.is_main_rank()) as progress:
            for step in range(steps):
                value_now, tokens = step_function(step, steps)
                self.history.append(value_now)
                self.tokens += tokens
                progress.set_postfix({value: f"{value_now:.3f}"}, refresh=False)
                progress.update()
        self.seconds = time.perf_counter() - begin
        share = (communication.seconds - communicated) / self.seconds
        self.communication_share = all_reduce_dict({"share": share}, GLOBAL, ReduceOp.AVG)["share"]
        self.tokens_per_second = self.tokens / self.seconds
        self.first, self.last = float(np.mean(self.history[:5])), float(np.mean(self.history[-5:]))


# ---------------------------------------------------------------------------------------------------------- running


class OneVoiceParser(argparse.ArgumentParser):
    """All ranks read the same arguments and leave alike; the main rank speaks."""

    context = CommContext()

    def _print_message(self, message: str, file=None) -> None:
        if self.context.is_main_rank():
            super()._print_message(message, file)
            sys.stdout.flush()

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        self._print_message(message or "", sys.stderr)
        self.context.destroy()  # waits for all: the first to leave with a status ends the job
        sys.exit(status)


def read_arguments(context: CommContext, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments, check them against the world, and make the output folder."""
    usage, description = __doc__.split("\n\n", 1)
    parser = OneVoiceParser(
        usage=f"{usage} [options]", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, help="ranks that split the vocabulary (default: 2, or 1 on an odd number)")
    parser.add_argument("--steps", type=int, default=150, help="supervised steps (default: 150)")
    parser.add_argument("--policy-steps", type=int, default=40, help="policy steps (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, text, prompts and samples (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write metrics.json and curves.png there")
    options = parser.parse_args(arguments)
    world = context.get_world_size(GLOBAL)
    options.tp = options.tp if options.tp is not None else 2 - world % 2
    if options.tp < 1 or world % options.tp:
        parser.error(f"argument --tp: {options.tp} does not divide the number of ranks, {world}")
    if world // options.tp > PROMPTS:
        parser.error(f"argument --tp: {world} ranks need at least {-(-world // PROMPTS)}: a step has {PROMPTS} prompts")
    for name in ("steps", "policy_steps"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1, is {getattr(options, name)}")
    if not 0 <= options.seed < 2**63:
        parser.error(f"argument --seed: must be at least 0 and below 2**63, is {options.seed}")
    problem = [None]
    if options.out and context.is_main_rank():
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()
        except OSError as error:
            problem = [f"argument --out: cannot write into {options.out}: {error.strerror}"]
    broadcast_object_list(problem, GLOBAL)
    if problem[0]:
        parser.error(problem[0])
    return options


def report(phases: Sequence[Phase], samples: Sequence, difference: float) -> None:
    """Print a completion of each of some prompts, and the final table."""
    print("\nIn the last policy step (the beginning of a real line | what the model wrote):")
    for (prompt, completion), reward in samples[::ROLLOUTS][:6]:
        print(f"  {'accepted' if reward else 'refused '}  {' '.join(prompt)} | {' '.join(completion).strip()}")
    heads = ("phase", "steps", "", "first", "last", "tokens", "tokens/s", "seconds", "communication")
    print("\n{:<11}{:>6}{:>8}{:>7}{:>7}{:>9}{:>10}{:>9}{:>15}".format(*heads))
    for phase in phases:
        print(
            f"{phase.title:<11}{len(phase.history):>6}{phase.value:>8}{phase.first:>7.2f}{phase.last:>7.2f}"
            f"{phase.tokens:>9,}{phase.tokens_per_second:>10,.0f}{phase.seconds:>9.1f}{phase.communication_share:>15.1%}"
        )
    print("first, last: means of 5 steps. loss: nats per lexeme. reward: share of lines accepted.")
    print("communication: share of the time in communication calls, waiting for other ranks included,")
    print("  the message inside the log-probability calls not included; mean of the ranks.")
    print(f"log-probabilities with and without the split differ by at most {difference:.1e}")


def save(folder: Path, training: Training, phases: Sequence[Phase], difference: float) -> None:
    """Write metrics.json (for one seed and layout all but "timing" is always the same) and curves.png."""
    layout, timing = training.layout, ("seconds", "tokens_per_second", "communication_share")
    metrics = {
        "seed": training.seed,
        "layout": {"dp": layout.dp, "tp": layout.tp},
        **{phase.value: phase.history for phase in phases},
        "gradient_norm": training.norms,
        "final": {phase.value: phase.last for phase in phases},
        "tokens": {phase.title: phase.tokens for phase in phases},
        "unsharded_difference": difference,
        "timing": {phase.title: {name: getattr(phase, name) for name in timing} for phase in phases},
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    labels = ("loss (nats per lexeme)", "reward (share of lines accepted)")
    for axes, phase, label in zip(figure.subplots(1, 2), phases, labels, strict=True):
        steps = range(1, len(phase.history) + 1)
        axes.plot(steps, phase.history, color="0.75", label="each step")
        axes.plot(steps, [np.mean(phase.history[max(0, step - 5) : step]) for step in steps], label="mean of 5 steps")
        axes.set(xlabel=f"{phase.title} step", ylabel=label, ylim=(0, None))
        axes.legend(frameon=False)
    figure.suptitle(f"data parallel {layout.dp} x tensor parallel {layout.tp}")
    figure.savefig(folder / "curves.png", dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)  # with two, the same run on a busy machine was seen to differ in its last bits
    context = CommContext()
    context.init_distributed_env()
    options = read_arguments(context, arguments)
    context.init_mesh(dp=context.get_world_size(GLOBAL) // options.tp, tp=options.tp)
    begin = time.perf_counter()
    corpus = share_corpus(context)
    layout = Layout(context, len(corpus.lexemes))
    if context.is_main_rank():
        print(f"data parallel {layout.dp} x tensor parallel {layout.tp}; {len(corpus.tokens):,} tokens of the standard")
        print(f"library in {len(corpus.lexemes):,} lexemes, read in {time.perf_counter() - begin:.1f} s", flush=True)

    model = LanguageModel(corpus, layout, options.seed)
    training = Training(corpus, model, options.seed)
    phases = (
        Phase("supervised", "loss", training.supervised_step, options.steps, context),
        Phase("policy", "reward", training.policy_step, options.policy_steps, context),
    )
    difference = largest_difference(model, training.batch())
    if not difference <= TOLERANCE:  # also where it is NaN
        raise RuntimeError(f"split and unsharded log-probabilities differ by {difference:.1e}, allowed {TOLERANCE:.0e}")
    if context.is_main_rank():
        report(phases, training.samples, difference)
        if options.out:
            save(options.out, training, phases, difference)
    context.destroy()


if __name__ == "__main__":
    main()
