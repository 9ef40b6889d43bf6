"""Which model families are supported, and by name which of their options are not."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["SUPPORTED", "check_no_dropout", "check_supported"]

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Hugging Face ``model_type`` of the dense grouped-query families: state is K and V alone."""


def check_supported(config: Any) -> None:
    """Raise ValueError, naming the option, for a model we would compute wrongly.

    Args:
        config: the Hugging Face configuration of the text model.
    """
    kind = getattr(config, "model_type", None)
    if kind not in SUPPORTED:
        raise ValueError(
            f"model_type: {kind!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    mixers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if mixers or getattr(config, "use_sliding_window", False):
        found = ", ".join(sorted(mixers)) or "use_sliding_window=True"
        raise ValueError(f"layer_types: only full_attention is supported for {kind}, got {found}")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout: {config.attention_dropout} is not supported, scoring and replay "
            "could not agree; set it to 0"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits: the router's auxiliary loss needs logits of prompt tokens, "
            "which are not kept; set it to False"
        )


def check_no_dropout(module: nn.Module) -> None:
    """Raise ValueError for a dropout layer (an adapter's, say): scores and replays would differ."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise ValueError(
                f"dropout: {name} has p={child.p}; scoring and replay could not agree, set it to 0"
            )
