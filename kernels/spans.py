"""Rows of consecutive tokens, addressed by absolute position.

What the indexer and the sparse attention read: resident pages, the new tokens' own rows, and on a
rank that owns only some pages whichever those are. Legend: T tokens, D row width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from longstraw_backend.kernels.staging import reachable

__all__ = ["Span", "check_spans", "consecutive", "spans_of_runs"]


class Span(NamedTuple):
    """Rows [T, D] of the tokens at absolute positions [start, start + T)."""

    start: int
    rows: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.rows.shape[0]


def consecutive(pages: Iterable[Tensor], start: int = 0) -> list[Span]:
    """Spans of pages [T_i, D] that lie one after another from ``start`` on."""
    spans: list[Span] = []
    for rows in pages:
        spans.append(Span(start, rows))
        start += rows.shape[0]
    return spans


def spans_of_runs(pages: Sequence[Tensor], runs: Sequence[range]) -> list[Span]:
    """Spans of an owner's pages [T_i, D], whose rows are the tokens of ``runs`` one after another.

    Args:
        runs: positions, ascending; where pages are cut has nothing to do with them.

    Raises:
        ValueError: pages and runs differ in the number of tokens.
    """
    rows, tokens = sum(page.shape[0] for page in pages), sum(map(len, runs))
    if rows != tokens:
        raise ValueError(
            f"runs: expected the positions of all {rows} rows of the pages, got {tokens}"
        )
    spans: list[Span] = []
    left = [run for run in runs if len(run)][::-1]
    for page in pages:
        while page.shape[0]:
            run = left.pop()
            count = min(len(run), page.shape[0])
            spans.append(Span(run.start, page[:count]))
            page = page[count:]
            if count < len(run):
                left.append(run[count:])
    return spans


def check_spans(name: str, spans: Sequence[Span], like: Tensor, stop: int) -> None:
    """Raise ValueError unless the spans lie in order before ``stop`` and go with ``like`` [S, D].

    Args:
        name: of the argument, for the message.
        like: the new tokens' rows: the spans must have their width and dtype, and lie on their
            device or in CPU memory.
        stop: first position of the new tokens.
    """
    before = 0
    for i, span in enumerate(spans):
        rows = span.rows
        if rows.dim() != 2 or rows.shape[1] != like.shape[1]:
            raise ValueError(
                f"{name}[{i}]: expected [T, {like.shape[1]}] as the new tokens' rows, "
                f"got {tuple(rows.shape)}"
            )
        if rows.dtype != like.dtype or not reachable(rows, like.device):
            raise ValueError(
                f"{name}[{i}]: captured as {rows.dtype} on {rows.device}, the new tokens are "
                f"{like.dtype} on {like.device}; capture and replay must use the same dtype, and "
                "the same device or CPU memory"
            )
        if span.start < before or span.stop > stop:
            raise ValueError(
                f"{name}[{i}]: expected positions in order within [{before}, {stop}), "
                f"got [{span.start}, {span.stop})"
            )
        before = span.stop
