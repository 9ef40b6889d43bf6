"""Attention layers: the stock modules, with our attention function in place of theirs.

Projections, norms, RoPE and output gates stay the module's own. The function is registered as
``longstraw`` with no mask function, so that no [S, T] mask is ever built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_backend.parallel.attention import owners_attention

from .context import Walk, walk_of_call

__all__ = ["ATTENTION"]

ATTENTION = "longstraw"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    longstraw: Walk | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    walk = walk_of_call(longstraw, attention_mask, "attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = _common_dtype(query, key, value)
    segment = walk.segment
    out = owners_attention(
        query,
        key,
        value,
        segment.resident(layer),
        walk.ranks.named("attention"),
        resident=segment.stop > 0,
        scale=scaling,
        staging=segment.staging,
        page_grads=segment.cotangents(layer),
        kept=walk.kept(layer),
    )
    real = (x[:, :, : walk.real] for x in (key, value))
    return walk.left(layer, out.transpose(1, 2), *real), None


def _common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast norms leave q and k wider than v; attention takes one dtype."""
    device = tensors[0].device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    )
    return [t.to(dtype) for t in tensors]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
