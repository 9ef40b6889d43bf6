"""Gated-delta-net layers (Qwen3.5, Qwen3.6, Qwen3-Next): the stock module with our forward.

The stock forward keeps its state in a cache that it changes in place and that differs between
versions of transformers, and runs single tokens through kernels without a backward. Ours is the
same arithmetic over a value of state: projections, norm and output are the module's own.

Legend: B rows, T tokens, D hidden size, C convolution channels (queries, keys, values), W width of
the convolution, M key heads, N value heads, K and V their dims.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from longstraw_backend.kernels.delta_rule import gated_delta_rule
from longstraw_backend.kernels.staging import here
from longstraw_backend.state import Recurrent

from .context import Walk, walk_of_call
from .cotangents import collected

__all__ = ["install"]


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
    walk = walk_of_call(longstraw, attention_mask, "gated delta net", alone=True)
    x_BTC, z, b_BTN, a_BTN = _projected(mixer, hidden_states)
    before = _boundary(mixer, walk, x_BTC)
    mixed_BTC, conv = _convolved(mixer, x_BTC, before.conv)
    q, k, v = _heads(mixer, mixed_BTC)
    # float32 as in the stock module, also for float64 models
    decay = -mixer.A_log.float().exp() * F.softplus(a_BTN.float() + mixer.dt_bias)
    rule = _unit(q), _unit(k), v, decay, b_BTN.sigmoid(), before.recurrent
    out_BTNV, recurrent = gated_delta_rule(*rule, final_state=walk.commit or walk.reverse)
    if recurrent is not None:
        out_BTNV = walk.left(mixer.layer_idx, out_BTNV, conv, recurrent)
    dim = mixer.head_v_dim
    normed: Tensor = mixer.norm(out_BTNV.reshape(-1, dim), z.reshape(-1, dim))
    out: Tensor = mixer.out_proj(normed.reshape(*hidden_states.shape[:2], -1))
    return out


def _projected(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _boundary(mixer: Any, walk: Walk, x_BTC: Tensor) -> Recurrent:
    """State before the new tokens, for every row of theirs and on their device; zeros where nothing
    came before."""
    rows = x_BTC.shape[0]
    resident: list[Recurrent] = walk.segment.resident(mixer.layer_idx)
    if resident:
        sinks = walk.segment.cotangents(mixer.layer_idx)[-1] or (None, None)
        conv, recurrent = (
            collected(here(x, x_BTC.device), into)
            for x, into in zip(resident[-1], sinks, strict=True)
        )
        return Recurrent(conv.expand(rows, -1, -1), recurrent.expand(rows, -1, -1, -1))
    wide = torch.promote_types(x_BTC.dtype, torch.float32)
    heads = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    return Recurrent(
        x_BTC.new_zeros(rows, x_BTC.shape[2], mixer.conv_kernel_size - 1),
        x_BTC.new_zeros(rows, *heads, dtype=wide),
    )


def _convolved(mixer: Any, x_BTC: Tensor, before_BCW: Tensor) -> tuple[Tensor, Tensor]:
    """The causal convolution and its activation [B, T, C], and the last W - 1 columns of its input.

    Those are a copy: a view would keep the whole chunk alive.
    """
    columns = torch.cat([before_BCW, x_BTC.transpose(1, 2)], dim=2)
    weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
    mixed: Tensor = ACT2FN[mixer.activation](
        F.conv1d(columns, weight, bias, groups=columns.shape[1])
    )
    return mixed.transpose(1, 2), columns[:, :, -before_BCW.shape[2] :].clone()


def _heads(mixer: Any, mixed_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, M, K] and values [B, T, N, V]."""
    q, k, v = mixed_BTC.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    dims = (q, mixer.head_k_dim), (k, mixer.head_k_dim), (v, mixer.head_v_dim)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in dims)
    return q, k, v


def _unit(x: Tensor) -> Tensor:
    """Heads scaled to length 1, as the stock kernels do it (epsilon 1e-6 under the root)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
