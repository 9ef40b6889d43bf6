"""The one operation everything is built from, and the blocks it is applied to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel, Head, Walk
from longstraw_backend.parallel.exchange import Ranks, own_run
from longstraw_backend.state import Segment

from .heads import log_probs_head

__all__ = ["Block", "advance", "own_tokens", "predict", "spans"]


def advance(
    model: DrivenModel,
    tokens_BT: Tensor,
    segment: Segment,
    *,
    grad: bool = False,
    commit: bool = True,
    reverse: bool = False,
    head: Head | None = None,
    checkpointing: bool = False,
) -> tuple[Tensor, ...]:
    """Run a block of new tokens over the state.

        capture, one prompt chunk      grad=False, commit=True
        score, decode                  grad=False, commit=False / on a branch of its own, True
        replay                         grad=True,  commit=False
        a block again, in reverse      grad=True,  commit=False, reverse=True

    Args:
        tokens_BT: token ids after ``segment``, [B, T] int64; B > 1 only where the rows share all
            state or each state has B rows.
        segment: state of all earlier tokens; extended by T tokens if ``commit``.
        reverse: the tokens are those that follow in a tracked segment, of which ``segment`` is a
            view: the backward also takes in the cotangents of what they left. One row.
        head: what to return, from the last hidden states; None for a capture, and in reverse for a
            block of a prompt, which returns the hidden states for the backward to begin at.

    Returns:
        The head's tensors, of this rank's run of the block; with ``grad`` they carry the graph of
        this run alone. The backward adds cotangents to tracked segments below.
    """
    ranks, length = model.ranks, tokens_BT.shape[1]
    mine = own_run(tokens_BT, ranks)
    first = segment.stop + ranks.rank * mine.shape[1]
    positions = torch.arange(first, first + mine.shape[1], device=mine.device)
    walk = Walk(segment, commit, head, length, checkpointing, reverse, ranks)
    with torch.set_grad_enabled(grad):
        out: tuple[Tensor, ...] = model.module(
            input_ids=mine, position_ids=positions.expand(mine.shape), longstraw=walk
        )
    if commit:
        segment.commit(length, ranks.own(length))
    return out


@dataclass(frozen=True)
class Block:
    """Tokens of one row, or of several over the same state, and what is to be predicted from each.

    Attributes:
        inputs: token ids, [T] or [B, T] int64.
        targets: token ids, in the same shape.
        temperature: of the distribution.
        entropy: whether entropies are wanted.
        head_chunk_tokens: tokens whose logits exist at one time.
    """

    inputs: Tensor
    targets: Tensor
    temperature: float
    entropy: bool
    head_chunk_tokens: int

    def __getitem__(self, part: slice) -> Block:
        return replace(self, inputs=self.inputs[..., part], targets=self.targets[..., part])

    @property
    def length(self) -> int:
        """T, tokens of a row."""
        return self.inputs.shape[-1]


def predict(
    model: DrivenModel,
    block: Block,
    segment: Segment,
    *,
    grad: bool = False,
    commit: bool = False,
    reverse: bool = False,
    checkpointing: bool = False,
) -> LogProbs:
    """:func:`advance` by a block with the log-prob head; [T / R] or [B, T / R] each, of this
    rank's run."""
    head = log_probs_head(
        own_run(block.targets, model.ranks).to(model.device),
        block.temperature,
        entropy=block.entropy,
        chunk_tokens=block.head_chunk_tokens,
    )
    out = advance(
        model,
        torch.atleast_2d(block.inputs).to(model.device),
        segment,
        grad=grad,
        commit=commit,
        reverse=reverse,
        head=head,
        checkpointing=checkpointing,
    )
    return LogProbs(*out)


def own_tokens(length: int, block: int, ranks: Ranks) -> int:
    """How many of so many tokens, walked in such blocks, this rank computes and keeps."""
    owned = (ranks.own(part.stop - part.start) for part in spans(length, block))
    return sum(own.stop - own.start for own in owned)


def spans(length: int, block: int) -> Iterator[slice]:
    """Blocks of a stretch of tokens; the last may be shorter."""
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))
