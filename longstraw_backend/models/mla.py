"""Forward of latent attention, dense or sparse, over resident latents.

Replaces the stock attention and indexer of glm_moe_dsa, deepseek_v32 and deepseek_v3, which expand
keys and values, build [S, T] masks and scores, and on transformers 5.10 rotate GLM's queries and
keys in the wrong pairs. Parameters stay those of the stock module, by the names all versions share:
q_a_proj, q_a_layernorm, q_b_proj (or q_proj), kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj
and indexer.{wq_b, wk, k_norm, weights_proj}.

State of a token is [c, r]: latent after its norm and rotated key, plus the index key where the
layer selects. ``kv_b_proj`` belongs to the new tokens' side: its key half is applied to the query,
its value half to the output, so it has a gradient through resident latents (as in transformers
5.23). The indexer is without gradient, as in all versions.

Legend: B rows, S new tokens, D hidden size, N heads, C = latent + RoPE width, R RoPE width,
H index heads, I index dim, K selected tokens, Q width of the query's low rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longstraw_backend.kernels.segment_attention import Kept
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.parallel.latent import owners_dense_mla, owners_sparse_mla
from longstraw_backend.parallel.selection import owners_topk

from .index_share import LayerKind
from .mla_spec import IndexSpec, MlaSpec

__all__ = ["MlaOutput", "Place", "Rope", "mla_attention", "rotate"]


class Rope(NamedTuple):
    """Cosines and sines [B, S, R] of the new tokens, as the stock rotary embedding makes them:
    the first half of R holds the angles, the second repeats it."""

    cos: Tensor
    sin: Tensor


class Place(NamedTuple):
    """Where a block lies, and what of it and of the tokens before is on this rank.

    Attributes:
        start: absolute position of the block's first token.
        tokens: of the block, of which the layer's input is this rank's run.
        runs: positions of the resident tokens that this rank owns, ascending.
        ranks: those that share the prompt.
    """

    start: int
    tokens: int
    runs: Sequence[range]
    ranks: Ranks = Ranks()

    @classmethod
    def alone(cls, pages: Sequence[Tensor], tokens: int) -> Place:
        """After pages that hold every token before."""
        start = sum(page.shape[1] for page in pages)
        return cls(start, tokens, [range(start)] if start else [])


class MlaOutput(NamedTuple):
    """What a layer returns for S new tokens.

    Attributes:
        hidden: [B, S, D], with gradient.
        latents: their state [B, S, C], with gradient.
        index_keys: their index keys [B, S, I] on ``full`` layers, without gradient.
        selection: absolute positions [B, S, K] int32, for the ``shared`` layers after this one.
    """

    hidden: Tensor
    latents: Tensor
    index_keys: Tensor | None
    selection: Tensor | None


def mla_attention(
    attn: Any,
    spec: MlaSpec,
    kind: LayerKind,
    hidden_BSD: Tensor,
    rope: Rope,
    latent_pages: Sequence[Tensor],
    index_pages: Sequence[Tensor] = (),
    selection_BSK: Tensor | None = None,
    latent_grads: Sequence[Tensor | None] | None = None,
    place: Place | None = None,
    kept: Kept | None = None,
) -> MlaOutput:
    """Attention of S new tokens over resident tokens and over themselves.

    With several ranks every one calls it for its run of the block, and joins in the backward.

    Args:
        attn: the stock attention module; only its projections and norms are called.
        kind: ``full`` runs the indexer, ``shared`` needs ``selection_BSK``, ``dense`` selects all.
        hidden_BSD: layer input after its norm.
        rope: of the new tokens, at their absolute positions.
        latent_pages: state of all earlier tokens from position 0, [1 or B, T_i, C].
        index_pages: their index keys, [1 or B, T_i, I]; ``full`` layers only.
        selection_BSK: for a ``shared`` layer that of the nearest ``full`` layer before. For a
            ``full`` layer None, or what it selected for the same tokens over the same state before
            (a recomputation): scores over all keys are then not made again.
        latent_grads: for each of ``latent_pages`` where the backward adds its gradient, or None for
            a constant: [1, T_i, C], the sum over rows. By default all are constants.
        place: by default this rank is alone, and the pages hold every token before.
        kept: spares a recomputation of a ``dense`` layer its attention.

    Raises:
        ValueError: a ``shared`` layer without a selection, or what the kernels refuse.
    """
    dtype = _compute_dtype(hidden_BSD)
    place = place or Place.alone(latent_pages, hidden_BSD.shape[1])
    q_low = _low_rank_queries(attn, hidden_BSD)
    q_nope, q_rope = _queries(attn, spec, hidden_BSD, q_low, rope)
    latents = _latents(attn, spec, hidden_BSD, rope).to(dtype)
    w_key, w_value = _absorbed_weights(attn.kv_b_proj, spec, like=latents)
    q_latent = torch.einsum("bsnd,ndc->bsnc", q_nope.to(dtype), w_key)
    q = torch.cat([q_latent, q_rope.to(q_latent.dtype)], dim=-1)

    index_keys, selection = None, selection_BSK
    if kind == "full":
        assert spec.index is not None and q_low is not None
        index_keys = _index_keys(attn.indexer, spec.index, hidden_BSD, rope).to(dtype)
        if selection is None:
            selection = _select(
                attn.indexer, spec.index, hidden_BSD, q_low, rope, index_keys, index_pages, place
            )
    if kind == "dense":
        out = _attend_all(spec, q, latents, latent_pages, latent_grads, place, kept)
    else:
        out = _attend(spec, q, latents, latent_pages, selection, latent_grads, place)
    values = torch.einsum("bsnc,nvc->bsnv", out, w_value)
    hidden = attn.o_proj(values.flatten(2))
    return MlaOutput(hidden, latents, index_keys, None if kind == "dense" else selection)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Under autocast norms leave tensors wider than projections; attention takes one dtype."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rotate(x: Tensor, rope: Rope, interleaved: bool) -> Tensor:
    """Turn pairs (a, b) of the last dim by their angles into (a cos - b sin, b cos + a sin).

    Args:
        x: [B, S, R] or [B, S, heads, R].
        interleaved: pairs are neighbours (0, 1), (2, 3), ...; else the halves (0, R/2), ...

    Returns:
        All first members, then all second ones: the order products need is the same for q and k.
    """
    half = x.shape[-1] // 2
    cos, sin = (t[..., :half] if x.dim() == 3 else t[:, :, None, :half] for t in rope)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _low_rank_queries(attn: Any, hidden: Tensor) -> Tensor | None:
    """[B, S, Q] after its norm; None where the query has no low rank (small DeepSeek-V3)."""
    if getattr(attn, "q_a_proj", None) is None:
        return None
    low: Tensor = attn.q_a_layernorm(attn.q_a_proj(hidden))
    return low


def _queries(
    attn: Any, spec: MlaSpec, hidden: Tensor, q_low: Tensor | None, rope: Rope
) -> tuple[Tensor, Tensor]:
    """[B, S, N, nope] and, rotated, [B, S, N, R]."""
    q = attn.q_proj(hidden) if q_low is None else attn.q_b_proj(q_low)
    q = q.unflatten(-1, (spec.heads, spec.nope + spec.rope))
    q_nope, q_rope = q.split([spec.nope, spec.rope], dim=-1)
    return q_nope, rotate(q_rope, rope, spec.interleaved)


def _latents(attn: Any, spec: MlaSpec, hidden: Tensor, rope: Rope) -> Tensor:
    """State of the new tokens, [B, S, C]."""
    latent, k_rope = attn.kv_a_proj_with_mqa(hidden).split([spec.latent, spec.rope], dim=-1)
    k_rope = rotate(k_rope, rope, spec.interleaved)
    latent = attn.kv_a_layernorm(latent)
    return torch.cat([latent, k_rope.to(latent.dtype)], dim=-1)


def _absorbed_weights(kv_b_proj: nn.Module, spec: MlaSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Key half [N, nope, latent] and value half [N, value, latent] of ``kv_b_proj``.

    A plain linear layer has them as its weight. Any other (LoRA, quantised) is asked for its rows
    by what it makes of the unit vectors, exactly, and with its own gradient.
    """
    if type(kv_b_proj) is nn.Linear:
        weight = kv_b_proj.weight
    else:
        weight = kv_b_proj(torch.eye(spec.latent, dtype=like.dtype, device=like.device)).mT
    weight = weight.to(like.dtype).unflatten(0, (spec.heads, spec.nope + spec.value))
    w_key, w_value = weight.split([spec.nope, spec.value], dim=1)
    return w_key, w_value


def _rows(pages: Sequence[Tensor], row: int) -> list[Tensor]:
    """Pages of one row: those with a batch of one are shared by all."""
    return [page[row if page.shape[0] > 1 else 0] for page in pages]


def _turn_first(x: Tensor, rope: Rope, interleaved: bool) -> Tensor:
    """RoPE on the first dims of the last axis, as many as it has."""
    width = rope.cos.shape[-1]
    turned = rotate(x[..., :width], rope, interleaved)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


@torch.no_grad()
def _index_keys(indexer: Any, spec: IndexSpec, hidden: Tensor, rope: Rope) -> Tensor:
    """Index keys of the new tokens, [B, S, I]."""
    return _turn_first(indexer.k_norm(indexer.wk(hidden)), rope, spec.interleaved)


@torch.no_grad()
def _select(
    indexer: Any,
    spec: IndexSpec,
    hidden: Tensor,
    q_low: Tensor,
    rope: Rope,
    keys: Tensor,
    pages: Sequence[Tensor],
    place: Place,
) -> Tensor:
    """Selection of the new tokens, [B, S, K] int32."""
    q = indexer.wq_b(q_low).unflatten(-1, (spec.heads, spec.dim))
    q = _turn_first(q, rope, spec.interleaved).to(keys.dtype)
    weights = _head_weights(indexer.weights_proj, hidden) * spec.heads**-0.5
    where: Any = dict(start=place.start, runs=place.runs, scale=spec.dim**-0.5)
    where["k"] = min(spec.k, place.start + place.tokens)
    picked = [
        owners_topk(*row, _rows(pages, i), place.ranks.named("selection"), **where)
        for i, row in enumerate(zip(q, weights, keys, strict=True))
    ]
    return torch.stack(picked)


def _head_weights(weights_proj: Any, hidden: Tensor) -> Tensor:
    """[B, S, H] in float32 or wider; the layer keeps its own dtype (float32 once loaded)."""
    with torch.autocast(hidden.device.type, enabled=False):
        weights: Tensor = weights_proj(hidden.to(weights_proj.weight.dtype))
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def _attend_all(
    spec: MlaSpec,
    q: Tensor,
    latents: Tensor,
    pages: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    place: Place,
    kept: Kept | None,
) -> Tensor:
    """Output in the latent space, [B, S, N, latent], from all tokens up to each."""
    how: Any = dict(scale=spec.scale, value_dim=spec.latent, page_grads=grads, kept=kept)
    ranks = place.ranks.named("latent")
    return owners_dense_mla(q, latents, pages, ranks, resident=place.start > 0, **how)


def _attend(
    spec: MlaSpec,
    q: Tensor,
    latents: Tensor,
    pages: Sequence[Tensor],
    selection: Tensor | None,
    grads: Sequence[Tensor | None] | None,
    place: Place,
) -> Tensor:
    """The same from selected tokens."""
    if selection is None:
        raise ValueError("selection: a shared layer needs that of a full layer before it")
    ranks = place.ranks.named("latent")
    where: Any = dict(start=place.start, runs=place.runs, scale=spec.scale, value_dim=spec.latent)
    where["page_grads"] = None if grads is None else [g if g is None else g[0] for g in grads]
    rows = [
        owners_sparse_mla(*row, _rows(pages, i), ranks, **where).out
        for i, row in enumerate(zip(q, latents, selection, strict=True))
    ]
    return torch.stack(rows)
