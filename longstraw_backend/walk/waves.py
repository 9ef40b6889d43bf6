"""Waves: siblings of the response tree that are run together, as rows of one pass.

A short response alone is a small pass, the smaller the more ranks share it. Leaves of one node
stand on the same state, so up to ``replay_tokens`` tokens of them make one block [B, T]: rows are
filled up at the end to the longest, where causal layers keep the filling from every real token, and
what is predicted there is dropped, without gradient.

Legend: B rows, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.kernels.logprob_head import LogProbs

from .tree import Node

__all__ = ["is_inner", "num_tokens", "padded", "rows_of", "waves"]


def is_inner(node: Node, config: LongStrawConfig) -> bool:
    """Whether something comes after a first block of the node."""
    return bool(node.children) or node.inputs.numel() > config.response_block


def waves(siblings: Sequence[Node], config: LongStrawConfig) -> Iterator[list[Node]]:
    """The siblings in order: inner nodes each alone, neighbouring leaves of one temperature
    together while they fit. A leaf that does not fit alone is alone all the same."""
    wave: list[Node] = []
    for node in siblings:
        if wave and not _fit([*wave, node], config):
            yield wave
            wave = []
        wave.append(node)
    if wave:
        yield wave


def _fit(nodes: Sequence[Node], config: LongStrawConfig) -> bool:
    if config.replay_tokens is None or any(is_inner(node, config) for node in nodes):
        return False
    alike = len({node.temperature for node in nodes}) == 1
    return alike and num_tokens(nodes) <= config.replay_tokens


def num_tokens(wave: Sequence[Node]) -> int:
    """Tokens of the block, B x T, filling included."""
    return len(wave) * max(node.inputs.numel() for node in wave)


def padded(wave: Sequence[Node]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the block, [B, T] each, filled up with token 0."""
    inputs = pad_sequence([node.inputs for node in wave], batch_first=True)
    return inputs, pad_sequence([node.targets for node in wave], batch_first=True)


def rows_of(block: LogProbs, wave: Sequence[Node]) -> list[LogProbs]:
    """Each row's own values, views [N] of [B, T]: a gradient of theirs is one of the block's, zero
    where it is filled up."""
    return [
        LogProbs(*(x[row, : node.inputs.numel()] for x in block)) for row, node in enumerate(wave)
    ]
