"""Latent-attention layers (GLM-5.x, DeepSeek-V3.2, DeepSeek-V3): the stock module with our forward.

Stock decoder layers, MoE blocks, routers and norms run as they are; the selection of a ``full``
layer reaches the ``shared`` ones through the layers' own return values, so it passes a checkpoint
of each layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from longstraw_backend.state import LatentPage

from .context import Walk, walk_of_call
from .index_share import LayerKind, layer_kinds
from .mla import MlaOutput, Place, Rope, mla_attention
from .mla_spec import MlaSpec, mla_spec

__all__ = ["install"]


def install(decoder_layer: Any) -> None:
    """Drive the attention of one decoder layer.

    Raises:
        ValueError: the configuration does not fit; see ``mla_spec`` and ``layer_kinds``.
    """
    attn = decoder_layer.self_attn
    kind = layer_kinds(attn.config)[attn.layer_idx]
    attn.forward = partial(_forward, attn, mla_spec(attn.config), kind)


def _forward(
    attn: Any,
    spec: MlaSpec,
    kind: LayerKind,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    longstraw: Walk | None = None,
    prev_topk_indices: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    walk = walk_of_call(longstraw, attention_mask, "latent attention")
    layer: int = attn.layer_idx
    pages: list[LatentPage] = walk.segment.resident(layer)
    sinks: list[LatentPage | None] = walk.segment.cotangents(layer)
    out = mla_attention(
        attn,
        spec,
        kind,
        hidden_states,
        Rope(*position_embeddings),
        [page.latents[:, 0] for page in pages],
        [page.index_keys[:, 0] for page in pages if page.index_keys is not None],
        walk.selections.get(layer) if kind == "full" else prev_topk_indices,
        [None if sink is None else sink.latents[:, 0] for sink in sinks],
        Place(walk.segment.stop, walk.tokens, walk.segment.runs, walk.ranks),
        walk.kept(layer) if kind == "dense" else None,
    )
    if out.selection is not None:
        walk.selections[layer] = out.selection
    hidden = walk.left(layer, out.hidden, *(x[:, :, : walk.real] for x in _state(out)))
    # GLM's decoder layer hands the selection on to the next
    hands_on = attn.config.model_type == "glm_moe_dsa"
    return (hidden, None, out.selection) if hands_on else (hidden, None)


def _state(out: MlaOutput) -> list[Tensor]:
    """What the new tokens leave, [B, 1, S, width] each."""
    kept = [out.latents] if out.index_keys is None else [out.latents, out.index_keys]
    return [x[:, None] for x in kept]
