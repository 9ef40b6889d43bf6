"""Latent attention by its definition: one pass, expanded keys and values, dense scores, one mask.

What transformers 5.23 computes, written independently of the kernels and of the absorbed form.
Rotations are complex products.

Legend: S tokens, N heads, R RoPE width, H index heads, K selected tokens of a query.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_backend.models.index_share import LayerKind
from longstraw_backend.models.mla import Rope
from longstraw_backend.models.mla_spec import MlaSpec

__all__ = ["reference_attention"]


def turn(x: Tensor, rope: Rope, interleaved: bool) -> Tensor:
    """[S, heads, R] times exp(i angle), pairs as complex numbers; real parts, then imaginary."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    angle = torch.complex(rope.cos[0, :, :half], rope.sin[0, :, :half])
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * angle[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def select(indexer: Any, spec: MlaSpec, hidden: Tensor, q_low: Tensor, rope: Rope) -> Tensor:
    """Mask [S, S] of the selected tokens: all scores at once, one topk a row."""
    assert spec.index is not None
    heads, dim, k, inter = spec.index.heads, spec.index.dim, spec.index.k, spec.index.interleaved
    q = indexer.wq_b(q_low).unflatten(-1, (heads, dim))
    key = indexer.k_norm(indexer.wk(hidden))[:, None]
    q, key = (
        torch.cat([turn(x[..., : spec.rope], rope, inter), x[..., spec.rope :]], -1)
        for x in (q, key)
    )
    scores = (torch.einsum("shd,td->sht", q, key[:, 0]) * dim**-0.5).relu()
    scores = torch.einsum("sh,sht->st", indexer.weights_proj(hidden) * heads**-0.5, scores)
    tokens = hidden.shape[0]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    picked = scores.masked_fill(~causal, float("-inf")).topk(min(k, tokens)).indices
    return torch.zeros_like(causal).scatter(1, picked, True) & causal


def reference_attention(
    attn: Any,
    spec: MlaSpec,
    kind: LayerKind,
    hidden: Tensor,
    rope: Rope,
    seen: Tensor | None = None,
    boundary: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [S, hidden] and the mask [S, S] of tokens seen.

    Args:
        hidden: [S, hidden].
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
    k_rope = turn(k_rope[:, None], rope, spec.interleaved)
    latent, k_rope = (torch.cat([x[:boundary].detach(), x[boundary:]]) for x in (latent, k_rope))

    expanded = attn.kv_b_proj(latent).unflatten(-1, (spec.heads, -1))
    k_nope, value = expanded.split([spec.nope, spec.value], -1)
    q = torch.cat([q_nope, turn(q_rope, rope, spec.interleaved)], -1)
    key = torch.cat([k_nope, k_rope.expand(-1, spec.heads, -1)], -1)
    if kind == "full":
        with torch.no_grad():
            seen = select(attn.indexer, spec, hidden, low, rope)  # type: ignore[arg-type]
    elif kind == "dense":
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert seen is not None
    scores = torch.einsum("snd,tnd->nst", q, key) * spec.scale
    probs = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return attn.o_proj(torch.einsum("nst,tnv->snv", probs, value).flatten(1)), seen
