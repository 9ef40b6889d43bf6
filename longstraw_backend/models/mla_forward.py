"""Put :func:`~longstraw_backend.models.mla.mla_attention` in the place of stock attention forwards.

The stock decoder layers, MoE blocks, router and norms run as they are; the selection of a ``full``
layer reaches the ``shared`` ones through the layers' own return values, so it passes a checkpoint
of each layer. What a walk must offer is :class:`LatentState`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from .index_share import LayerKind, layer_kinds
from .mla import MlaOutput, Rope, mla_attention
from .mla_spec import MlaSpec, mla_spec

__all__ = ["LatentState", "StateOf", "replace_attention"]


class LatentState(Protocol):
    """State of latent-attention layers during one call of the model, by layer index."""

    def latents(self, layer: int) -> Sequence[Tensor]:
        """Pages [1 or B, T, latent + RoPE] of all earlier tokens, in order."""
        ...

    def index_keys(self, layer: int) -> Sequence[Tensor]:
        """Pages [1 or B, T, index dim] of the same tokens; asked on ``full`` layers only."""
        ...

    def selection(self, layer: int) -> Tensor | None:
        """What this layer selected earlier in this very call, [B, S, K]: asked again when a
        checkpointed layer is recomputed, so that scores over all keys are made once."""
        ...

    def receive(self, layer: int, out: MlaOutput) -> None:
        """Take the new tokens' latents and index keys if they are to stay, and the selection of a
        ``full`` layer for :meth:`selection`. Called once more in a recomputation."""
        ...


StateOf = Callable[[Any], LatentState]
"""From what a call of the model carries as ``longstraw`` to its state."""


def replace_attention(model: nn.Module, state_of: StateOf) -> None:
    """Replace the attention forward of every layer of a glm_moe_dsa, deepseek_v32 or deepseek_v3.

    Args:
        model: the stock causal LM, with an attention implementation for which Hugging Face makes
            no mask.

    Raises:
        ValueError: the configuration does not fit; see ``mla_spec`` and ``layer_kinds``.
    """
    stock: Any = model
    spec, kinds = mla_spec(stock.config), layer_kinds(stock.config)
    with_selection = stock.config.model_type == "glm_moe_dsa"
    for layer, kind in zip(stock.model.layers, kinds, strict=True):
        attn = layer.self_attn
        attn.forward = partial(_forward, attn, spec, kind, with_selection, state_of)


def _forward(
    attn: Any,
    spec: MlaSpec,
    kind: LayerKind,
    with_selection: bool,
    state_of: StateOf,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    longstraw: Any = None,
    prev_topk_indices: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    if longstraw is None or attention_mask is not None:
        raise ValueError(
            "latent attention: expected a walk and no mask; call longstraw_backend.walk.advance"
        )
    layer: int = attn.layer_idx
    state = state_of(longstraw)
    out = mla_attention(
        attn,
        spec,
        kind,
        hidden_states,
        Rope(*position_embeddings),
        state.latents(layer),
        state.index_keys(layer) if kind == "full" else (),
        state.selection(layer) if kind == "full" else prev_topk_indices,
    )
    state.receive(layer, out)
    return (out.hidden, None, out.selection) if with_selection else (out.hidden, None)
