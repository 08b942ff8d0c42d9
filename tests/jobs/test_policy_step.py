"""The main example: the text and reward that it learns from, and the job itself on 1, 2 and 4 ranks."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from starting import ROOT, Finished

pytest.importorskip("matplotlib", reason="the example needs the extra bench")
pytest.importorskip("tqdm", reason="the example needs the extra bench")

EXAMPLE = ROOT / "examples" / "01_policy_step.py"
sys.path.insert(0, str(EXAMPLE.parent))
specification = importlib.util.spec_from_file_location("policy_step", EXAMPLE)
policy_step = importlib.util.module_from_spec(specification)
specification.loader.exec_module(policy_step)
import stdlib_text  # noqa: E402  beside the example
from stdlib_text import DEDENT, INDENT, NEWLINE, UNKNOWN, Corpus, lexemes_of, reward_of  # noqa: E402

# --------------------------------------------------------------------------------------------------------------- text

SOURCE = '''\
# a comment
class A:  # another
    """A docstring of more than forty characters, which is to be emptied."""

    def f(self, x):
        return [x,
                self.y]
value = b"0123456789012345678901234567890123456789" + 'kept'
'''
LEXEMES = [
    *("class", "A", ":", NEWLINE, INDENT, '""', NEWLINE),
    *("def", "f", "(", "self", ",", "x", ")", ":", NEWLINE, INDENT),
    *("return", "[", "x", ",", "self", ".", "y", "]", NEWLINE, DEDENT, DEDENT),
    *("value", "=", 'b""', "+", "'kept'", NEWLINE),
]


def test_lexemes_drop_comments_and_empty_long_strings() -> None:
    assert lexemes_of(SOURCE) == LEXEMES


def test_lexemes_keep_formatted_strings_whole() -> None:
    source = 'a = f\'{b!r:>{c}} {d}\' f"""\n{e}"""\n'
    assert lexemes_of(source) == ["a", "=", "f'{b!r:>{c}} {d}'", 'f"""\n{e}"""', NEWLINE]


@pytest.mark.parametrize("line", ["x = {1: 'a', **b}[c]", "def f(a, *, b=lambda: 0) -> int: pass", "del a.b, c[1:2]"])
def test_lexemes_joined_by_spaces_mean_the_same(line: str) -> None:
    lexemes = lexemes_of(line)
    assert lexemes[-1] == NEWLINE
    assert ast.dump(ast.parse(" ".join(lexemes[:-1]))) == ast.dump(ast.parse(line))


def test_corpus_numbers_the_most_frequent_lexemes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = x + y\nz = x\n")  # x 3, = 2, NEWLINE 2, then +, y, z
    (tmp_path / "b.py").write_text("x\n")
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = Corpus.read(4)
    assert corpus.lexemes == [UNKNOWN, "x", NEWLINE, "="]
    assert corpus.text(corpus.tokens.tolist()) == [
        *("x", "=", "x", UNKNOWN, UNKNOWN, NEWLINE),
        *(UNKNOWN, "=", "x", NEWLINE),
        *("x", NEWLINE),
    ]
    assert corpus.counts.tolist() == [3, 4, 3, 2]
    assert corpus.lines.tolist() == [[0, 5], [6, 9]]  # `x` alone is too short to cut


def test_corpus_lines_begin_after_indentation() -> None:
    lexemes = [UNKNOWN, *sorted(set(LEXEMES))]
    corpus = Corpus(lexemes, torch.tensor([lexemes.index(lexeme) for lexeme in LEXEMES]))
    assert corpus.counts[0] == 1  # no lexeme is unknown here, and yet its logarithm is finite
    lines = [corpus.text(corpus.tokens[begin : end + 1].tolist()) for begin, end in corpus.lines.tolist()]
    assert [" ".join(line[:-1]) for line in lines] == [
        "class A :",
        "def f ( self , x ) :",
        "return [ x , self . y ]",
        "value = b\"\" + 'kept'",
    ]
    assert {tuple(corpus.draw_line(torch.Generator().manual_seed(seed))) for seed in range(30)} == {
        tuple(corpus.tokens[begin : end + 1].tolist()) for begin, end in corpus.lines.tolist()
    }


def test_no_source_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no Python source"):
        Corpus.read(10)


@pytest.mark.parametrize(
    "line", ["return x", "if a :", "for i in range ( 3 ) :", "import os", "a : int = 1", "class A :"]
)
def test_reward_for_accepted_lines(line: str) -> None:
    assert reward_of([*line.split(), NEWLINE]) == 1.0


@pytest.mark.parametrize("line", ["return )", "if a", "else :", "x = [ 1 :", "= 1", "lambda :", "a b"])
def test_no_reward_for_refused_lines(line: str) -> None:
    assert reward_of([*line.split(), NEWLINE]) == 0.0


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["x"],
        ["x", UNKNOWN, "y", NEWLINE],  # as text they would be comparisons
        ["x", INDENT, "y", NEWLINE],
        ["x", DEDENT, "y", NEWLINE],
        ["(", NEWLINE, ")", NEWLINE],
    ],
    ids=["empty", "unfinished", "unknown", "indent", "dedent", "two lines"],
)
def test_no_reward_for_what_is_no_line(line: list[str]) -> None:
    assert reward_of(line) == 0.0


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("tp", [1, 2, 3, 16])
def test_noise_is_the_same_however_columns_and_prompts_are_split(tp: int) -> None:
    columns = 16 * policy_step.NOISE_TILE

    def noise(rank: int, ranks: int, prompts: range) -> torch.Tensor:
        layout = SimpleNamespace(start=columns * rank // ranks, end=columns * (rank + 1) // ranks)
        return policy_step.gumbel_noise(layout, prompts, seed=5, step=1, position=2)

    whole = noise(0, 1, range(3))
    assert whole.shape == (3 * policy_step.ROLLOUTS, columns)
    assert torch.equal(
        torch.cat([noise(rank, tp, range(1, 3)) for rank in range(tp)], 1), whole[policy_step.ROLLOUTS :]
    )
    assert len(whole.unique()) > 0.9 * min(whole.numel(), 2**17)  # not one stream for all
    assert abs(whole.mean().item() - 0.5772) < 0.01  # Euler's constant; 0.003 is one standard error


# ---------------------------------------------------------------------------------------------------------------- job


def metrics_of(
    job: Callable[..., Finished], out: Path, n: int, *args: str, steps: tuple[int, int] = (16, 3), limit: float = 180
) -> dict:
    """Run the example; its metrics.json."""
    lengths = ["--steps", str(steps[0]), "--policy-steps", str(steps[1])]
    finished = job(EXAMPLE, n, [*lengths, "--out", str(out), *args], limit=limit)
    assert finished.status == 0, finished.output
    for expected in ("In the last policy step", "communication", "supervised", "with and without the split differ by"):
        assert expected in finished.output
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((out / "metrics.json").read_text())
    keys = ("seed", "layout", "loss", "reward", "gradient_norm", "final", "tokens", "unsharded_difference", "timing")
    assert tuple(metrics) == keys
    assert (len(metrics["loss"]), len(metrics["reward"])) == steps
    assert 0 < metrics["unsharded_difference"] <= 1e-5  # float32 against float64: never quite equal
    for phase in metrics["timing"].values():
        assert phase["seconds"] > 0
        assert phase["tokens_per_second"] > 0
        assert 0 < phase["communication_share"] < 1
    return metrics


@pytest.mark.slow
def test_one_and_four_ranks_learn_alike(job: Callable[..., Finished], tmp_path: Path) -> None:
    one = metrics_of(job, tmp_path / "one", 1)
    four = metrics_of(job, tmp_path / "four", 4, "--tp", "2")
    assert one["layout"] == {"dp": 1, "tp": 1}
    assert four["layout"] == {"dp": 2, "tp": 2}
    assert sum(one["loss"][-3:]) / 3 < sum(one["loss"][:3]) / 3 - 0.3
    assert one["reward"][-1] > 0  # else the policy step had nothing to learn from
    assert four["loss"] == pytest.approx(one["loss"], abs=1e-4)
    # The noise is the same on both, so what is sampled is too, unless two candidates are within a rounding.
    assert four["reward"] == one["reward"]
    assert four["tokens"] == one["tokens"]
    assert four["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    assert one["tokens"]["supervised"] == 16 * 16 * 32


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(job: Callable[..., Finished], tmp_path: Path) -> None:
    first, second = (
        metrics_of(job, tmp_path / name, 2, "--tp", "2", "--seed", "3", steps=(16, 2)) for name in ("first", "second")
    )
    assert first.pop("timing") is not second.pop("timing")
    assert first == second


def test_a_difference_ends_the_job(job: Callable[..., Finished]) -> None:
    """On three ranks, whose parts of the vocabulary are of different widths."""
    script = f"""
        import importlib.util, sys, torch
        sys.path.insert(0, {str(EXAMPLE.parent)!r})
        specification = importlib.util.spec_from_file_location("policy_step", {str(EXAMPLE)!r})
        example = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(example)
        right = example.from_parallel_logits_to_logprobs
        error = 1e-4 if example.CommContext().init_distributed_env() or example.CommContext().is_main_rank() else 0.0
        example.CommContext().destroy()
        example.from_parallel_logits_to_logprobs = lambda *given: right(*given) + error * (not torch.is_grad_enabled())
        example.main(["--tp", "3", "--steps", "1", "--policy-steps", "1"])
    """
    finished = job(script, 3, limit=120)
    assert finished.status == 1
    assert "log-probabilities differ by 1.0e-04, allowed 1e-05" in finished.output


@pytest.mark.parametrize(
    ("n", "args", "message"),
    [
        (2, ["--tp", "3"], "argument --tp: 3 does not divide the number of ranks, 2"),
        (1, ["--out", "/dev/null/x"], "argument --out: cannot write into /dev/null/x: Not a directory"),
    ],
)
def test_wrong_arguments_are_refused_in_one_message(
    job: Callable[..., Finished], n: int, args: list[str], message: str
) -> None:
    finished = job(EXAMPLE, n, args)
    assert finished.status == 2
    assert finished.output.count(message) == 1
    assert "Traceback" not in finished.output


@pytest.mark.slow
@pytest.mark.parametrize(("n", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_the_whole_job_learns(job: Callable[..., Finished], tmp_path: Path, n: int, tp: int) -> None:
    metrics = metrics_of(job, tmp_path, n, "--tp", str(tp), steps=(150, 40), limit=600)
    assert metrics["loss"][0] > 4.9  # the unigram entropy is 5.0
    assert metrics["final"]["loss"] < 4.5
    assert metrics["reward"][0] < 0.5
    assert metrics["final"]["reward"] > 0.6
