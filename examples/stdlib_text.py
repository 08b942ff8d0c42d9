"""The text that the examples learn from: the Python standard library's own source, as numbered lexemes.

A lexeme is a token of the ``tokenize`` module. Comments and blank lines are dropped, strings over 40 characters are
emptied, and indentation stands as lexemes of its own. Nothing here communicates.
"""

from __future__ import annotations

import ast
import io
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

UNKNOWN, NEWLINE, INDENT, DEDENT = "<unknown>", "\n", "<indent>", "<dedent>"
LONGEST_STRING = 40
LINE_LENGTHS = range(3, 25)  # lexemes in the lines that prompts are cut from, without the NEWLINE


def lexemes_of(source: str) -> list[str]:
    """Cut Python source into lexemes; lexemes joined by spaces are source again, line by line."""
    named = {"NEWLINE": NEWLINE, "INDENT": INDENT, "DEDENT": DEDENT}
    lines = source.splitlines(keepends=True)
    lexemes: list[str] = []
    formatted: list[tuple[int, int]] = []  # where the f-strings that we are inside of begin (Python 3.12 and later)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text = tokenize.tok_name[token.type], token.string
        if kind in ("COMMENT", "NL", "ENDMARKER"):
            continue
        if kind in ("FSTRING_START", "TSTRING_START"):
            formatted.append(token.start)
        elif kind in ("FSTRING_END", "TSTRING_END"):
            kind, text = "STRING", text_between(lines, formatted.pop(), token.end)
        if formatted:
            continue
        if kind == "STRING" and len(text) > LONGEST_STRING:
            text = text[: min(text.find(mark) for mark in "'\"" if mark in text)] + '""'  # keeps the b of b"..."
        lexemes.append(named.get(kind, text))
    return lexemes


def text_between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The source between two positions as tokenize counts them: lines from 1, columns from 0."""
    wanted = lines[start[0] - 1 : end[0]]
    wanted[-1] = wanted[-1][: end[1]]
    wanted[0] = wanted[0][start[1] :]
    return "".join(wanted)


def reward_of(line: Sequence[str]) -> float:
    """1 where Python's parser accepts the line, else 0.

    The line must end with its NEWLINE; the head of a block gets a `pass`. A line with an unknown lexeme, or with an
    indent or dedent inside, is refused.
    """
    if not line or line[-1] != NEWLINE or {UNKNOWN, INDENT, DEDENT, NEWLINE} & set(line[:-1]):
        return 0.0
    source = " ".join(line[:-1])
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings
            ast.parse(source + " pass" if source.endswith(":") else source)
    except (SyntaxError, ValueError):
        return 0.0
    return 1.0


class Corpus:
    """A text as lexeme numbers.

    Args:
        lexemes: by number; the first is UNKNOWN.
        tokens: [length] int64, the text.

    Attributes:
        counts: [vocabulary] float32, how often each lexeme occurs (at least 1).
        lines: [lines, 2] int64, for each logical line whose length is in LINE_LENGTHS where it begins in ``tokens``
            and where its NEWLINE is.
        newline: the number of NEWLINE.
    """

    def __init__(self, lexemes: list[str], tokens: Tensor) -> None:
        self.lexemes, self.tokens = lexemes, tokens
        self.counts = torch.bincount(tokens, minlength=len(lexemes)).clamp(min=1).float()
        self.newline = lexemes.index(NEWLINE)
        breaks = torch.tensor([n for n, lexeme in enumerate(lexemes) if lexeme in (NEWLINE, INDENT, DEDENT)])
        ends = torch.isin(tokens, breaks).nonzero()[:, 0]
        begins = torch.cat([torch.tensor([0]), ends[:-1] + 1])
        lengths = ends - begins
        wanted = (tokens[ends] == self.newline) & (lengths >= LINE_LENGTHS.start) & (lengths < LINE_LENGTHS.stop)
        self.lines = torch.stack([begins, ends], 1)[wanted]

    @classmethod
    def read(cls, size: int) -> Corpus:
        """Read the standard library's top-level modules; number the ``size - 1`` most frequent lexemes."""
        folder = Path(sysconfig.get_path("stdlib"))
        text: list[str] = []
        for path in sorted(folder.glob("*.py")):
            with tokenize.open(path) as file:
                text += lexemes_of(file.read())
        if not text:
            raise FileNotFoundError(f"no Python source in {folder}: this Python comes without its standard library's")
        by_count = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
        lexemes = [UNKNOWN, *(lexeme for lexeme, _ in by_count[: size - 1])]
        number = {lexeme: index for index, lexeme in enumerate(lexemes)}
        return cls(lexemes, torch.tensor([number.get(lexeme, 0) for lexeme in text]))

    def text(self, numbers: Sequence[int]) -> list[str]:
        """The lexemes of some numbers."""
        return [self.lexemes[number] for number in numbers]

    def draw_line(self, generator: torch.Generator) -> list[int]:
        """A random line that the parser accepts (`else:`, alone, never is), with its NEWLINE."""
        while True:
            start, end = self.lines[torch.randint(len(self.lines), (), generator=generator)].tolist()
            line = self.tokens[start : end + 1].tolist()
            if reward_of(self.text(line)):
                return line
