"""Latent attention of the ordinary side, by its definition: one pass over all tokens.

Expanded keys and values, all scores at once, one mask [S, S]: what transformers 5.23 computes,
written independently of the kernels and of the absorbed form. Stock modules can't be the reference
themselves: until 5.10 GLM's is neither causal nor rotated as its checkpoints need, until 5.17 the
others keep expanded keys and values, whose gradient is another one (tests hold this file against
the stock modules of 5.17 and 5.23, which are right).

What a prompt hands on are latents, rotated keys and index keys; ``kv_b_proj`` belongs to the tokens
that look back. The selection has no gradient.

Legend: S tokens, N heads, R RoPE width, H index heads, K selected tokens of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw_backend.models.index_share import LayerKind, layer_kinds
from longstraw_backend.models.mla import Rope
from longstraw_backend.models.mla_spec import MlaSpec, mla_spec

__all__ = ["latent_attentions", "reference_attention"]


@contextmanager
def latent_attentions(model: nn.Module, boundary: int | None) -> Iterator[None]:
    """Let the model's latent-attention layers, if it has any, run by their definition, with the
    first ``boundary`` tokens constant; None holds nothing constant. One row at a time."""
    attns: list[Any] = [m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa")]
    stock: list[Callable[..., Any]] = [attn.forward for attn in attns]
    for attn in attns:
        attn.forward = partial(_forward, attn, boundary or 0)
    try:
        yield
    finally:
        for attn, forward in zip(attns, stock, strict=True):
            attn.forward = forward


def _forward(
    attn: Any,
    boundary: int,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    prev_topk_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """A shared layer gets the mask of tokens seen where the stock module hands on positions."""
    kind = layer_kinds(attn.config)[attn.layer_idx]
    (hidden,) = hidden_states
    rope = Rope(*position_embeddings)
    out, seen = reference_attention(
        attn, mla_spec(attn.config), kind, hidden, rope, prev_topk_indices, boundary
    )
    hands_on = attn.config.model_type == "glm_moe_dsa"
    return (out[None], None, seen) if hands_on else (out[None], None)


def reference_attention(
    attn: Any,
    spec: MlaSpec,
    kind: LayerKind,
    hidden: Tensor,
    rope: Rope,
    seen: Tensor | None = None,
    boundary: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [S, D] of one row and the mask [S, S] of tokens seen.

    Args:
        hidden: [S, D].
        seen: mask of a ``shared`` layer.
        boundary: latents and rotated keys of the tokens before it are constants.
    """
    tokens = hidden.shape[0]
    has_low = getattr(attn, "q_a_proj", None) is not None
    low = attn.q_a_layernorm(attn.q_a_proj(hidden)) if has_low else None
    q = attn.q_proj(hidden) if low is None else attn.q_b_proj(low)
    q_nope, q_rope = q.unflatten(-1, (spec.heads, -1)).split([spec.nope, spec.rope], -1)
    latent, k_rope = attn.kv_a_proj_with_mqa(hidden).split([spec.latent, spec.rope], -1)
    latent = attn.kv_a_layernorm(latent)
    k_rope = _turn(k_rope[:, None], rope, spec.interleaved)
    latent, k_rope = (torch.cat([x[:boundary].detach(), x[boundary:]]) for x in (latent, k_rope))

    expanded = attn.kv_b_proj(latent).unflatten(-1, (spec.heads, -1))
    k_nope, value = expanded.split([spec.nope, spec.value], -1)
    q = torch.cat([q_nope, _turn(q_rope, rope, spec.interleaved)], -1)
    key = torch.cat([k_nope, k_rope.expand(-1, spec.heads, -1)], -1)
    if kind == "full":
        with torch.no_grad():
            seen = _selected(attn.indexer, spec, hidden, low, rope)
    elif kind == "dense":
        seen = _causal(tokens, hidden.device)
    assert seen is not None
    q, key, value = (x.transpose(0, 1)[None].to(value.dtype) for x in (q, key, value))
    (out,) = F.scaled_dot_product_attention(q, key, value, attn_mask=seen, scale=spec.scale)
    return attn.o_proj(out.transpose(0, 1).flatten(1)), seen


def _causal(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def _turn(x: Tensor, rope: Rope, interleaved: bool) -> Tensor:
    """[S, heads, R] times exp(i angle), pairs as complex numbers; real parts, then imaginary."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    angle = torch.complex(*(part[0, :, :half].to(wide) for part in rope))
    turned = torch.complex(pairs[..., 0].to(wide), pairs[..., 1].to(wide)) * angle[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def _selected(
    indexer: Any, spec: MlaSpec, hidden: Tensor, low: Tensor | None, rope: Rope
) -> Tensor:
    """Mask [S, S] of the selected tokens: all scores at once, one topk a row."""
    assert spec.index is not None
    heads, dim, inter = spec.index.heads, spec.index.dim, spec.index.interleaved
    q = indexer.wq_b(low).unflatten(-1, (heads, dim))
    key = indexer.k_norm(indexer.wk(hidden))[:, None]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    q, key = (
        torch.cat([_turn(x[..., : spec.rope], rope, inter), x[..., spec.rope :]], -1).to(wide)
        for x in (q, key)
    )
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).to(wide)
    scores = (torch.einsum("shd,td->sht", q, key[:, 0]) * dim**-0.5).relu()
    scores = torch.einsum("sh,sht->st", weights * heads**-0.5, scores)
    tokens = hidden.shape[0]
    causal = _causal(tokens, hidden.device)
    picked = scores.masked_fill(~causal, float("-inf")).topk(min(spec.index.k, tokens)).indices
    return torch.zeros_like(causal).scatter(1, picked, True) & causal
