"""How many weights a text model has and which of them every token meets, layer by layer.

Counted on a model without storage, so that it is the stock module's own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from .families import layer_types_of

__all__ = ["LayerSizes", "ModelSizes", "head_width", "num_routed"]

_NOT_ADAPTED = "gate", "gate_proj", "up_proj", "down_proj"
"""Modules without adapters where there are experts."""


@dataclass(frozen=True)
class LayerSizes:
    """Weights of one decoder layer.

    Attributes:
        kind: as its family names it.
        linear: elements of weight matrices that every token meets, the indexer's left out.
        index_linear: of the indexer's, on layers that select.
        expert: of the routed experts, as many as a token meets.
        edges: rows and columns of matrices that LoRA adapts, the indexer's left out; times its
            rank, its elements.
        inputs: columns of those.
        index_edges: rows and columns of the indexer's, whose adapters have no gradient.
    """

    kind: str
    linear: int
    index_linear: int
    expert: int
    edges: int
    inputs: int
    index_edges: int


@dataclass(frozen=True)
class ModelSizes:
    """Weights of a causal LM.

    Attributes:
        layers: of each decoder layer.
        head: elements of the output embedding, V x D.
        parameters: all elements, a tied embedding counted once.
        routed: those of routed experts.
        largest: those of the largest parameter of a decoder layer.
    """

    layers: tuple[LayerSizes, ...]
    head: int
    parameters: int
    routed: int
    largest: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """Of the model with this Hugging Face text configuration.

        Raises:
            ValueError: the family is not supported.
        """
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        kinds = layer_types_of(config)
        layers = zip(model.model.layers, kinds, strict=True)
        return cls(
            tuple(_layer_sizes(layer, kind, config) for layer, kind in layers),
            model.lm_head.weight.numel(),
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for n, p in model.named_parameters() if ".mlp.experts." in n),
            max(p.numel() for p in model.model.layers.parameters()),
        )


def _layer_sizes(layer: nn.Module, kind: str, config: Any) -> LayerSizes:
    named = dict(layer.named_parameters())
    routed = {n: p for n, p in named.items() if ".experts." in n}
    matrices = {n: p for n, p in named.items() if p.dim() == 2 and n not in routed}
    index = {n: p for n, p in matrices.items() if ".indexer." in n}
    left_out = _NOT_ADAPTED if num_routed(config) else ()
    adapted = {n: p for n, p in matrices.items() if n.split(".")[-2] not in left_out}
    share = config.num_experts_per_tok / num_routed(config) if routed else 0
    return LayerSizes(
        kind,
        sum(p.numel() for n, p in matrices.items() if n not in index),
        sum(p.numel() for p in index.values()) if kind == "full" else 0,
        round(sum(p.numel() for p in routed.values()) * share),
        sum(sum(p.shape) for n, p in adapted.items() if n not in index),
        sum(p.shape[1] for n, p in adapted.items() if n not in index),
        sum(sum(p.shape) for p in index.values()),
    )


def num_routed(config: Any) -> int:
    """Experts of a layer that tokens are routed to; 0 in a dense model."""
    return int(getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", 0) or 0)


def head_width(config: Any) -> int:
    """Of an attention head."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width)
