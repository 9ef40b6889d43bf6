"""Gated-delta-net layers (Qwen3.5, Qwen3.6, Qwen3-Next): the stock module with our forward.

The stock forward keeps its state in a cache that it changes in place and that differs between
versions of transformers, and runs single tokens through kernels without a backward. Ours is the
same arithmetic over a value of state: projections, norm and output are the module's own.

Legend: B rows, T tokens, C convolution channels, N value heads, V their dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import here
from longstraw_backend.state import Recurrent

from .context import Walk, walk_of_call
from .cotangents import collected
from .delta_by_head import can_share_heads, own_heads, run_by_head
from .delta_by_position import run_by_position
from .delta_heads import DeltaHeads

__all__ = ["finished", "install", "projected"]


def install(decoder_layer: Any) -> None:
    """Drive the mixer of one decoder layer."""
    mixer = decoder_layer.linear_attn
    mixer.forward = partial(_forward, mixer)


def _forward(
    mixer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    longstraw: Walk | None = None,
    **_: Any,
) -> Tensor:
    walk = walk_of_call(longstraw, attention_mask, "gated delta net")
    heads = DeltaHeads.of(mixer)
    x_BTC, z, b_BTN, a_BTN = projected(mixer, hidden_states)
    tokens = x_BTC, b_BTN, a_BTN
    out_BTNV, after = _mixed(walk, mixer.layer_idx, heads, tokens)
    if after is not None:
        out_BTNV = walk.left(mixer.layer_idx, out_BTNV, *after)
    return finished(mixer, out_BTNV, z)


def _mixed(
    walk: Walk, layer: int, heads: DeltaHeads, tokens: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Recurrent | None]:
    """Outputs, and the state after the block if it is wanted, from columns, b and a.

    Ranks that share the block own some heads each; more ranks than heads a run of tokens each.
    """
    ranks, wanted = walk.ranks.named("delta_rule"), walk.commit or walk.reverse
    if ranks.size == 1:
        before = _boundary(walk, layer, tokens[0], heads)
        return heads.run(*tokens, before, final_state=wanted)
    shared = can_share_heads(heads, ranks.size)
    before = _boundary(walk, layer, tokens[0], own_heads(heads, ranks) if shared else heads)
    run = run_by_head if shared else run_by_position
    return run(heads, *tokens, before, ranks, walk.tokens, final_state=wanted)


def projected(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns before the convolution [B, T, C], gate z, and b and a [B, T, N]."""
    if not hasattr(mixer, "in_proj_qkvz"):
        return (
            mixer.in_proj_qkv(hidden),
            mixer.in_proj_z(hidden),
            mixer.in_proj_b(hidden),
            mixer.in_proj_a(hidden),
        )
    # Qwen3-Next packs the projections by key head
    packed = mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(*packed)
    return torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), z, b, a


def finished(mixer: Any, out_BTNV: Tensor, z: Tensor) -> Tensor:
    """Hidden states [B, T, D] from the rule's outputs and the gate."""
    dim = mixer.head_v_dim
    normed: Tensor = mixer.norm(out_BTNV.reshape(-1, dim), z.reshape(-1, dim))
    hidden: Tensor = mixer.out_proj(normed.reshape(*out_BTNV.shape[:2], -1))
    return hidden


def _boundary(walk: Walk, layer: int, x_BTC: Tensor, heads: DeltaHeads) -> Recurrent:
    """State before the new tokens, for every row of theirs and on their device; zeros where nothing
    came before."""
    rows = x_BTC.shape[0]
    resident: list[Recurrent] = walk.segment.resident(layer)
    if not resident:
        return heads.nothing(x_BTC)
    sinks = walk.segment.cotangents(layer)[-1] or (None, None)
    conv, recurrent = (
        collected(here(x, x_BTC.device), into) for x, into in zip(resident[-1], sinks, strict=True)
    )
    return Recurrent(conv.expand(rows, -1, -1), recurrent.expand(rows, -1, -1, -1))
