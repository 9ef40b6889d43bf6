"""Tiny random models of each family, for tests and ``longstraw compare --family``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_backend.models import SUPPORTED

__all__ = ["tiny_model"]

_COMMON: dict[str, Any] = dict(
    vocab_size=311,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1 << 22,
    tie_word_embeddings=False,
)
_MOE: dict[str, Any] = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1
)


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> nn.Module:
    """A random causal LM of a few hundred thousand parameters, in eval mode.

    Args:
        family: Hugging Face ``model_type``.
        options: configuration values to override.

    Raises:
        ValueError: the family is not supported.
    """
    if family not in SUPPORTED:
        raise ValueError(f"family: expected one of {', '.join(SUPPORTED)}, got {family!r}")
    torch.manual_seed(seed)
    values = _COMMON | (_MOE if family.endswith("_moe") else {}) | options
    config = AutoConfig.for_model(family, **values)
    model: nn.Module = (
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    )
    if (
        dtype == torch.float64
        and hasattr(model, "set_experts_implementation")
        and "num_experts" in values
    ):
        implementation: Any = model.set_experts_implementation
        implementation("eager")  # the grouped kernels refuse float64
    return model
