"""Walk a segment in reverse: the gradient of all its tokens with one block's graph alive.

Forward, block i takes the state s_i to s_{i+1} and predicts; what it predicted has the gradient
g_i, and the state after it the cotangent c_{i+1}, which later blocks and branches have left. In
reverse, block by block,

    recompute block i under autograd from s_i; backward from (g_i, c_{i+1});
    parameters receive their gradient, and c_i what the block's backward leaves on s_i

which is the chain rule cut at the boundaries, so the gradient is that of one graph over all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel
from longstraw_backend.parallel.exchange import Ranks, own_run, whole
from longstraw_backend.state import Segment

from .advance import Block, advance, predict, spans

__all__ = ["backward_of", "recorded", "reverse_prompt", "reverse_response", "seen"]

Turn = Callable[[int], AbstractContextManager[None]]
"""Context of the pass of so many tokens."""


def seen(out: LogProbs, tokens: int, ranks: Ranks) -> LogProbs:
    """The values of a whole block, [..., tokens] each, on every rank that shares it; without
    graph."""
    ranks = ranks.named("log_probs")
    return LogProbs(*(whole(x.detach(), tokens, ranks) for x in out))


def recorded(values: LogProbs) -> LogProbs:
    """The values as leaves of a graph: what a loss makes of them is then in their ``grad``."""
    return LogProbs(*(x.detach().requires_grad_() for x in values))


def backward_of(out: LogProbs, leaves: LogProbs, ranks: Ranks, part: slice = slice(None)) -> None:
    """Run the backward of ``out``, a run of a block, from what a loss has left on the block's
    tokens of ``leaves``.

    A loss that does not depend on them still has its backward, of zeros: other ranks, and the
    cotangents of later tokens, come through it.
    """
    roots = [(x, leaf) for x, leaf in zip(out, leaves, strict=True) if x.requires_grad]
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in roots]
    torch.autograd.backward([x for x, _ in roots], [own_run(g[..., part], ranks) for g in grads])


def reverse_response(
    model: DrivenModel,
    block: Block,
    leaves: LogProbs,
    segment: Segment,
    block_tokens: int,
    turn: Turn,
    *,
    checkpointing: bool,
) -> None:
    """Walk a stretch of a response in reverse.

    Args:
        block: all its tokens.
        leaves: log-probs and entropies of the forward walk, with the loss's gradient, [T] each.
        segment: what the forward walk has left, tracked; its cotangents are spent.
    """

    def again(part: slice, before: Segment) -> None:
        out = predict(
            model, block[part], before, grad=True, reverse=True, checkpointing=checkpointing
        )
        backward_of(out, leaves, model.ranks, part)

    _in_reverse(segment, block_tokens, turn, again)


def reverse_prompt(
    model: DrivenModel,
    tokens: Tensor,
    segment: Segment,
    block_tokens: int,
    turn: Turn,
    *,
    checkpointing: bool,
) -> None:
    """Walk a captured prompt in reverse: nothing is predicted, all comes from its cotangents.

    Args:
        tokens: those that were captured, [P - 1] int64 on the model's device.
        segment: their state, tracked; its cotangents are spent.
    """

    def again(part: slice, before: Segment) -> None:
        (hidden,) = advance(
            model,
            tokens[None, part],
            before,
            grad=True,
            commit=False,
            reverse=True,
            checkpointing=checkpointing,
        )
        hidden.backward(torch.zeros_like(hidden))

    _in_reverse(segment, block_tokens, turn, again)


def _in_reverse(
    segment: Segment, block_tokens: int, turn: Turn, again: Callable[[slice, Segment], None]
) -> None:
    """Each block from the last to the first, over the state before it; its cotangents are spent
    when it is done."""
    for part in reversed(list(spans(segment.length, block_tokens))):
        with turn(part.stop - part.start):
            again(part, segment.before(part.start))
        segment.drop_cotangents(part.start)
