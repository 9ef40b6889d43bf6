"""``autograd.Function`` of absorbed attention over selected rows, in blocks of queries.

Legend: S queries (of a block), N heads, K selected tokens of a query, C latent and RoPE width,
V the latent's width, the first V of C.

Forward, with L the gathered rows [S, K, C]:

    x = scale q L^T,   l = logsumexp_K x,   p = exp(x - l),   o = p L[:V]

Backward, from do and dl, recomputing L and p:

    dx = p (do L[:V]^T - sum_V do o + dl)
    dq = scale dx L,   dL = scale dx^T q + [p^T do, 0]

and dL is added to the rows it was gathered from. On CUDA that sum is atomic: its order, and so the
last bits of the cotangent, may vary between runs. The forward never does.

Rows in CPU memory are brought over whole, in the forward and again in the backward; the graph keeps
no copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span
from longstraw_backend.kernels.staging import here

from .gather import gather_rows, scatter_add_rows

__all__ = ["SelectedAttention"]

BLOCK_ELEMENTS = 1 << 24
"""Of gathered rows and scores of a block of queries: 64 MiB of float32."""


def _blocks(q_SNC: Tensor, selection_SK: Tensor) -> Iterator[slice]:
    queries, heads, width = q_SNC.shape
    each = max(1, selection_SK.shape[1] * (heads + width))
    size = max(1, BLOCK_ELEMENTS // each)
    for start in range(0, queries, size):
        yield slice(start, start + size)


def _scores(q: Tensor, rows: Tensor, found: Tensor, scale: float) -> Tensor:
    """[S, N, K], -inf where there is no row."""
    return (q @ rows.mT).mul_(scale).masked_fill_(~found[:, None], float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 for a query without any row, whose lse is -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()


def _spans(starts: Sequence[int], rows: Sequence[Tensor], device: torch.device) -> list[Span]:
    return [Span(s, here(r, device)) for s, r in zip(starts, rows, strict=True)]


class SelectedAttention(torch.autograd.Function):
    """(q, selection, scale, V, starts, *rows) -> (o [S, N, V] as q, l [S, N] float32 or wider).

    Differentiable in q and in every tensor of rows that requires it; ``starts`` has their first
    positions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        selection: Tensor,
        scale: float,
        value_dim: int,
        starts: tuple[int, ...],
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        spans = _spans(starts, rows, q.device)
        out = q.new_empty(*q.shape[:2], value_dim)
        lse = q.new_empty(q.shape[:2], dtype=wide)
        for block in _blocks(q, selection):
            latents, found = gather_rows(spans, selection[block], wide)
            scores = _scores(q[block].to(wide), latents, found, scale)
            lse[block] = scores.logsumexp(-1)
            out[block] = _probabilities(scores, lse[block]) @ latents[..., :value_dim]
        ctx.save_for_backward(q, selection, out, lse, *rows)
        ctx.scale, ctx.starts = scale, starts
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, selection, out, lse, *rows = ctx.saved_tensors
        spans = _spans(ctx.starts, rows, q.device)
        dq = torch.empty_like(q)
        drows = [
            torch.zeros_like(r, dtype=lse.dtype, device=q.device) if needed else None
            for r, needed in zip(rows, ctx.needs_input_grad[5:], strict=True)
        ]
        targets = [Span(s, d) for s, d in zip(ctx.starts, drows, strict=True) if d is not None]
        for block in _blocks(q, selection):
            part = q[block], out[block], lse[block], dout[block], dlse[block]
            dq[block], dlatents = _backward_of_block(
                *part, *gather_rows(spans, selection[block], lse.dtype), ctx.scale, bool(targets)
            )
            for target in targets:
                scatter_add_rows(target, selection[block], dlatents)
        grads = [d if d is None else d.to(r) for d, r in zip(drows, rows, strict=True)]
        return dq, None, None, None, None, *grads


def _backward_of_block(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    latents: Tensor,
    found: Tensor,
    scale: float,
    rows_too: bool,
) -> tuple[Tensor, Tensor]:
    """dq and dL of a block; dL is empty unless ``rows_too``."""
    wide = lse.dtype
    q, out, dout = q.to(wide), out.to(wide), dout.to(wide)
    value_dim = out.shape[-1]
    probs = _probabilities(_scores(q, latents, found, scale), lse)
    delta = (dout * out).sum(-1) - dlse
    dscores = probs * (dout @ latents[..., :value_dim].mT - delta[..., None]) * scale
    dq = dscores @ latents
    if not rows_too:
        return dq, dq.new_empty(0)
    dlatents = dscores.mT @ q
    dlatents[..., :value_dim] += probs.mT @ dout
    return dq, dlatents
