"""The gated delta rule (Yang et al., Gated Delta Networks, 2412.06464), in chunks.

Legend: B rows, T tokens, N value heads, M key heads, G = N / M, K key dim, V value dim,
C tokens of a chunk.

For every row and value head, from the state S_0 [K, V] on,

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
    o_t = scale * S_t^T q_t

Within a chunk, with c_i = g_1 + ... + g_i and S the state before it, the same is

    A_ij = beta_i exp(c_i - c_j) k_i . k_j  for j < i, else 0
    (I + A) U = diag(beta) (V - diag(exp(c)) K S)
    O = scale * (diag(exp(c)) Q S + (exp(c_i - c_j) q_i . k_j)_{j <= i} U)
    S' = exp(c_C) S + (diag(exp(c_C - c)) K)^T U

Any number of tokens is run as chunks of 64 and a shorter last one, one token too: scoring, replay
and decoding take the same path. Keys should have length 1; the caller normalises them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .choice import Impl, choose_impl, get_rule

__all__ = ["gated_delta_rule"]


def gated_delta_rule(
    q_BTMK: Tensor,
    k_BTMK: Tensor,
    v_BTNV: Tensor,
    g_BTN: Tensor,
    beta_BTN: Tensor,
    state_BNKV: Tensor,
    *,
    scale: float | None = None,
    final_state: bool = True,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run T tokens over a state.

    Args:
        q_BTMK: queries, [B, T, M, K]; float64, float32, bfloat16 or float16.
        k_BTMK: keys, [B, T, M, K], N a multiple of M: each serves G neighbouring value heads.
        v_BTNV: values, [B, T, N, V], in the dtype of q, as k.
        g_BTN: logarithm of the decay, [B, T, N], at most 0.
        beta_BTN: how much of the value is written, [B, T, N].
        state_BNKV: state before the first token, [B, N, K, V]; float64 for float64 inputs, else
            float32. It is never written to.
        scale: factor on the output; K ** -0.5 by default.
        final_state: whether the state after the last token is wanted.
        impl: ``reference`` or ``fla``; by default what the device and dtype ask for.

    Returns:
        The output [B, T, N, V] in the dtype of q, and the state after the last token, a new tensor
        like ``state_BNKV``, or None. Both are differentiable in all six inputs.

    Raises:
        ValueError: a shape, dtype or device does not fit; the text says which.
        RuntimeError: the fast path is not installed, or known to be wrong on this machine.
    """
    _check(q_BTMK, k_BTMK, v_BTNV, g_BTN, beta_BTN, state_BNKV)
    rule = get_rule(choose_impl(q_BTMK.device, q_BTMK.dtype) if impl is None else impl)
    groups = v_BTNV.shape[2] // q_BTMK.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (q_BTMK, k_BTMK))
    wide = state_BNKV.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        return rule(q, k, v_BTNV, g_BTN.to(wide), beta_BTN.to(wide), state_BNKV, scale, final_state)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    if q.dim() != 4 or v.dim() != 4 or q.shape[1] == 0:
        raise ValueError(
            f"q, v: expected [B, T, heads, dim] with T >= 1, got {tuple(q.shape)}, {tuple(v.shape)}"
        )
    rows, tokens, key_heads, dim = q.shape
    heads, value_dim = v.shape[2:]
    if heads % key_heads:
        raise ValueError(f"v: {heads} value heads are no multiple of {key_heads} key heads")
    shapes = {
        "k": (k, q.shape),
        "v": (v, (rows, tokens, heads, value_dim)),
        "g": (g, (rows, tokens, heads)),
        "beta": (beta, (rows, tokens, heads)),
        "state": (state, (rows, heads, dim, value_dim)),
    }
    for name, (x, shape) in shapes.items():
        if x.shape != shape or x.device != q.device:
            raise ValueError(
                f"{name}: expected {list(shape)} on {q.device}, got {list(x.shape)} on {x.device}"
            )
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, x, dtype in (("k", k, q.dtype), ("v", v, q.dtype), ("state", state, wide)):
        if x.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype} for q of {q.dtype}, got {x.dtype}")
