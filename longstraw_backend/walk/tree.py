"""Responses of a group as a tree: what several begin with is run once.

A node is a stretch of (input token, target token) pairs: token by token, what goes in and what is
to be predicted. So paths part one token before the texts do, at the last input they have in common:
the boundary rule of prompts, at every level. A plain group is a tree of depth one, whose root is
the prompt; turns of an agent that several rows share are inner nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw_backend.groups import Group, Row

__all__ = ["Node", "response_tree"]


@dataclass
class Node:
    """A stretch of tokens that the rows below it share.

    Attributes:
        inputs: token ids, [N] int64, N >= 1.
        targets: the token after each, [N].
        temperature: of all rows below.
        children: what comes next, by row.
        rows: those that end here.
    """

    inputs: Tensor
    targets: Tensor
    temperature: float
    children: list[Node] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __iter__(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child


def response_tree(
    group: Group, temperature: Callable[[Row], float], shared_tokens: int
) -> list[Node]:
    """The children of the group's prompt; rows without a response are in none of them.

    Args:
        temperature: of each row; rows of different temperatures share nothing.
        shared_tokens: a stretch that several rows have in common becomes a node of its own if it
            has so many tokens; shorter ones are run in each row.
    """
    last = group.prompt[-1:].cpu()
    paths = [
        _Path(row, torch.cat([last, row.response.cpu()]), temperature(row))
        for row in group.rows
        if row.response.numel()
    ]
    return _grow(paths, 0, shared_tokens)


@dataclass(frozen=True)
class _Path:
    """A row's last prompt token and response, [1 + R]."""

    row: Row
    tokens: Tensor
    temperature: float

    @property
    def length(self) -> int:
        return self.tokens.numel() - 1

    def node(self, start: int, stop: int) -> Node:
        inputs, targets = self.tokens[start:stop], self.tokens[start + 1 : stop + 1]
        return Node(inputs, targets, self.temperature)


def _grow(paths: Sequence[_Path], start: int, shared: int) -> list[Node]:
    nodes = []
    for alike in _alike(paths, start, shared):
        stop = _common(alike, start)
        node = alike[0].node(start, stop)
        node.rows = [p.row for p in alike if p.length == stop]
        node.children = _grow([p for p in alike if p.length > stop], stop, shared)
        nodes.append(node)
    return nodes


def _alike(paths: Sequence[_Path], start: int, shared: int) -> list[list[_Path]]:
    """Paths that go on with the same ``shared`` tokens, together; the others alone."""
    found: dict[object, list[_Path]] = {}
    for place, path in enumerate(paths):
        enough = path.length - start >= shared
        ahead = path.tokens[start : start + shared + 1]
        key = (path.temperature, tuple(ahead.tolist())) if enough else place
        found.setdefault(key, []).append(path)
    return list(found.values())


def _common(paths: Sequence[_Path], start: int) -> int:
    """Where the pairs of tokens that all paths have from ``start`` on end."""
    stop = min(p.length for p in paths)
    first = paths[0].tokens[start : stop + 1]
    for path in paths[1:]:
        differ = (path.tokens[start : stop + 1] != first).nonzero()
        if differ.numel():
            stop = start + int(differ[0]) - 1
            first = first[: stop + 1 - start]
    return stop
