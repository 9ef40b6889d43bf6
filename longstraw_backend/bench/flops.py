"""Floating-point operations of each pass, by formula.

A product of [m, k] and [k, n] is 2 m k n. For T new tokens over S resident ones:

    matmul      2 T w                     w weights that a token meets, the output embedding's too
    experts     2 T w                     w weights of a token's routed experts
    pages       4 T S N H                 attention over the state: 2 products, q k^T and p v
    causal      4 N H T (T + 1) / 2       among the new tokens
    sparse      2 N (L + V) s             sparse attention, s selected pairs
    index       2 I D (T S + T (T + 1) / 2)                      index scores
    delta_rule  T (N (6 K V + 4 C K + 3 C V) + 2 M W)            gated delta net, chunks of C = 64

and in the backward: linear layers, experts and delta rule twice that, linear layers and experts
once if they are frozen; index scores none; causal attention 5 products for 2 (q k^T again, do v^T,
dq, dk, dv); pages the same with ``exact``, but 3 with ``response_only``: they are constants, only
dq is needed, whatever a kernel makes. The log-prob head makes its logits again. With activation
checkpointing the forward is made once more, without selection, attention over all tokens and head:
what they gave is kept.

Legend: N heads of width H; delta net: value heads of K x V, M channels, width W of the convolution;
latent attention: L the latent with RoPE, V the latent; I index heads of width D.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from longstraw_backend.choices import Gradient
from longstraw_backend.models.mla_spec import mla_spec
from longstraw_backend.models.sizes import LayerSizes, ModelSizes, head_width

__all__ = ["Flops", "Training", "capture_flops", "replay_flops", "reverse_flops"]

_DELTA_CHUNK = 64


@dataclass(frozen=True)
class Flops:
    """By kind of work; see the table."""

    matmul: float = 0.0
    experts: float = 0.0
    pages: float = 0.0
    causal: float = 0.0
    sparse: float = 0.0
    index: float = 0.0
    delta_rule: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(astuple(self)))

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True)
class Training:
    """What a replay trains, and how.

    Attributes:
        gradient: with ``exact``, pages have a gradient too.
        lora: rank of adapters, 0 trains all parameters.
        checkpointing: recompute each layer in the backward.
    """

    gradient: Gradient = "response_only"
    lora: int = 0
    checkpointing: bool = True


def capture_flops(config: Any, sizes: ModelSizes, start: int, stop: int, *, lora: int = 0) -> Flops:
    """Of a capture of tokens [start, stop), in chunks of any size: pages are here what comes before
    ``start``, causal the rest."""
    return _forward(config, sizes, start, stop - start, lora)


def replay_flops(
    config: Any, sizes: ModelSizes, context: int, tokens: int, how: Training
) -> tuple[Flops, Flops, Flops]:
    """Of one block of a response: its forward, which alone is that of a score, what of it is made
    again, and its backward."""
    head = 2.0 * tokens * sizes.head
    forward, again, backward = reverse_flops(config, sizes, context, tokens, how)
    return (
        forward + Flops(matmul=head),
        again,
        backward + Flops(matmul=head * (2 if how.lora else 3)),
    )


def reverse_flops(
    config: Any, sizes: ModelSizes, context: int, tokens: int, how: Training
) -> tuple[Flops, Flops, Flops]:
    """Of one block without the head: of a prompt that is walked in reverse."""
    forward = _forward(config, sizes, context, tokens, how.lora)
    backward = sum(
        (_layer_backward(config, layer, context, tokens, how) for layer in sizes.layers),
        start=Flops(),
    )
    if not how.checkpointing:
        return forward, Flops(), backward
    spared = sum(layer.index_linear + how.lora * layer.index_edges for layer in sizes.layers)
    again = replace(
        forward, matmul=forward.matmul - 2.0 * tokens * spared, index=0.0, pages=0.0, causal=0.0
    )
    return forward, again, backward


def _forward(config: Any, sizes: ModelSizes, start: int, tokens: int, lora: int) -> Flops:
    layers = (_layer_forward(config, layer, start, tokens, lora) for layer in sizes.layers)
    return sum(layers, start=Flops())


def _layer_forward(config: Any, layer: LayerSizes, start: int, tokens: int, lora: int) -> Flops:
    weights = layer.linear + layer.index_linear + lora * (layer.edges + layer.index_edges)
    linear = Flops(matmul=2.0 * tokens * weights, experts=2.0 * tokens * layer.expert)
    return linear + _mixing(config, layer, start, tokens)


def _layer_backward(
    config: Any, layer: LayerSizes, start: int, tokens: int, how: Training
) -> Flops:
    mixing = _mixing(config, layer, start, tokens)
    exact = how.gradient == "exact" or start == 0
    linear = layer.linear * (1 if how.lora else 2) + 2 * how.lora * layer.edges
    key, value = _latent_widths(config, layer)
    products = 3 * key + 2 * value if exact else 2 * key + value
    return Flops(
        matmul=2.0 * tokens * linear,
        experts=2.0 * tokens * layer.expert * (1 if how.lora else 2),
        pages=mixing.pages * (2.5 if exact else 1.5),
        causal=mixing.causal * 2.5,
        sparse=mixing.sparse * products / (key + value),
        delta_rule=mixing.delta_rule * 2,
    )


def _pairs(start: int, tokens: int) -> tuple[float, float]:
    """Of new and resident tokens, and of new ones up to themselves."""
    return float(tokens) * start, tokens * (tokens + 1) / 2


def _mixing(config: Any, layer: LayerSizes, start: int, tokens: int) -> Flops:
    """What mixes tokens."""
    if layer.kind == "linear_attention":
        return Flops(delta_rule=float(tokens) * _delta_rule(config))
    if layer.kind in ("full", "shared"):
        sparse = 2.0 * mla_spec(config).heads * sum(_latent_widths(config, layer))
        return Flops(
            sparse=sparse * _selected_pairs(int(config.index_topk), start, tokens),
            index=_scores(config, start, tokens) if layer.kind == "full" else 0.0,
        )
    if layer.kind == "dense":
        each = 2.0 * mla_spec(config).heads * sum(_latent_widths(config, layer))
    else:
        each = 4.0 * config.num_attention_heads * head_width(config)
    pages, causal = _pairs(start, tokens)
    return Flops(pages=pages * each, causal=causal * each)


def _delta_rule(config: Any) -> int:
    """Of a token."""
    k, v = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    rule = values * (6 * k * v + _DELTA_CHUNK * (4 * k + 3 * v))
    return rule + 2 * (2 * keys * k + values * v) * int(config.linear_conv_kernel_dim)


def _latent_widths(config: Any, layer: LayerSizes) -> tuple[int, int]:
    """Of keys and values of latent attention; anything for other layers."""
    if layer.kind not in ("dense", "full", "shared"):
        return 1, 1
    spec = mla_spec(config)
    return spec.latent + spec.rope, spec.latent


def _selected_pairs(k: int, start: int, tokens: int) -> float:
    """Queries and what they select: all there is, up to k."""
    growing = max(0, min(tokens, k - start))  # queries that have no k tokens yet
    few = growing * start + growing * (growing + 1) / 2
    return float(few + (tokens - growing) * k)


def _scores(config: Any, start: int, tokens: int) -> float:
    index = mla_spec(config).index
    assert index is not None
    return 2.0 * index.heads * index.dim * sum(_pairs(start, tokens))
