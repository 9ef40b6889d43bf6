"""Inputs of the attention tests, and the definition they are compared with.

Legend: B rows, N query heads, K key/value heads, T new tokens, S page tokens, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page

__all__ = [
    "OWN",
    "SHARED",
    "Case",
    "Inputs",
    "make_inputs",
    "plain_attention",
    "torch_attention",
    "value_and_grads",
]

OWN, SHARED = False, True
Attention = Callable[[Tensor, Tensor, Tensor, Sequence[Page]], Tensor]


@dataclass(frozen=True)
class Case:
    """Shapes of one call; ``pages`` has each page's tokens and whether all rows share it."""

    rows: int
    heads: int
    kv_heads: int
    tokens: int
    pages: tuple[tuple[int, bool], ...] = ()
    head_dim: int = 16

    @property
    def scale(self) -> float:
        return 1.25 * self.head_dim**-0.5  # not the default of any kernel


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of the new tokens, pages, and the output's cotangent."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: list[Page]
    dout: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers, widened or rounded."""
        pages = [Page(k.to(dtype), v.to(dtype)) for k, v in self.pages]
        return Inputs(*(t.to(dtype) for t in (self.q, self.k, self.v)), pages, self.dout.to(dtype))


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random inputs, laid out as a model lays them out: transposed q, k, v; pages cut from buffers.

    What the buffers hold beyond a page's tokens is NaN: a kernel that reads it fails the test.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def heads(count: int) -> Tensor:
        return normal(case.rows, case.tokens, count, case.head_dim).transpose(1, 2)

    def page_tensor(tokens: int, shared: bool) -> Tensor:
        shape = 1 if shared else case.rows, case.kv_heads, tokens + 3, case.head_dim
        buffer = torch.full(shape, float("nan"), dtype=dtype, device=device)
        view = buffer[:, :, :tokens]
        view.copy_(normal(*view.shape))
        return view

    pages = [Page(page_tensor(*page), page_tensor(*page)) for page in case.pages]
    q, k, v, dout = heads(case.heads), heads(case.kv_heads), heads(case.kv_heads), heads(case.heads)
    return Inputs(q, k, v, pages, dout)


def _all_keys(new_BKTH: Tensor, old: Sequence[Tensor], heads: int) -> Tensor:
    rows = new_BKTH.shape[0]
    joined = torch.cat([*(t.expand(rows, -1, -1, -1) for t in old), new_BKTH], dim=2)
    return joined.repeat_interleave(heads // new_BKTH.shape[1], dim=1)


def _keys_values_seen(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, pages: Sequence[Page]
) -> tuple[Tensor, Tensor, Tensor]:
    """All keys and values, a head for each query head, and which of them each query sees."""
    heads, tokens = q_BNTH.shape[1:3]
    k = _all_keys(k_BKTH, [page.k for page in pages], heads)
    v = _all_keys(v_BKTH, [page.v for page in pages], heads)
    seen = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=q_BNTH.device)
    return k, v, seen.tril(k.shape[2] - tokens)


def plain_attention(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, pages: Sequence[Page], scale: float
) -> Tensor:
    """softmax(scale q K^T + mask) V over all keys at once, in the inputs' dtype."""
    k, v, seen = _keys_values_seen(q_BNTH, k_BKTH, v_BKTH, pages)
    return (q_BNTH @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def torch_attention(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, pages: Sequence[Page], scale: float
) -> Tensor:
    """The same by torch's fused attention: what the inputs' dtype costs in one call."""
    k, v, seen = _keys_values_seen(q_BNTH, k_BKTH, v_BKTH, pages)
    return F.scaled_dot_product_attention(q_BNTH, k, v, attn_mask=seen, scale=scale)


def value_and_grads(attention: Attention, inputs: Inputs) -> list[Tensor]:
    """The output, dq, dk and dv."""
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = attention(*leaves, inputs.pages)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]
