"""Tiny random models of each family, for tests and ``longstraw compare --family``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from longstraw_backend.models import SUPPORTED
from longstraw_backend.models.families import text_model_type
from longstraw_backend.wide import compute_wide

__all__ = ["AVAILABLE", "options_of", "tiny_model"]

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
_PARTIAL_ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
_GATED_DELTA_NET: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    rope_parameters=_PARTIAL_ROPE,
)
_QWEN3_5: dict[str, Any] = _GATED_DELTA_NET | dict(
    rope_parameters=_PARTIAL_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
)
_MOE: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1
)
_SHARED_EXPERT: dict[str, Any] = dict(shared_expert_intermediate_size=32)
_LATENT: dict[str, Any] = dict(
    num_hidden_layers=4,
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=8,
    v_head_dim=12,
    first_k_dense_replace=3,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=48,
    pad_token_id=None,
)
# 64 index heads: with few of them ReLU leaves exact zeros, and ties.
_SPARSE: dict[str, Any] = dict(index_n_heads=64, index_head_dim=16, index_topk=12)
_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MOE,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5 | _MOE | _SHARED_EXPERT,
    "qwen3_next": _GATED_DELTA_NET | _MOE | _SHARED_EXPERT,
    "glm_moe_dsa": _LATENT | _SPARSE | dict(index_topk_freq=2),
    "deepseek_v32": _LATENT | _SPARSE,
    "deepseek_v3": _LATENT,
}

AVAILABLE = tuple(name for name in SUPPORTED if text_model_type(name) in CONFIG_MAPPING)
"""Supported families that the installed transformers has."""


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> nn.Module:
    """A random causal LM of a few hundred thousand parameters, in eval mode.

    Args:
        family: Hugging Face ``model_type``.
        options: configuration values to override.

    Raises:
        ValueError: the family is not supported, or not known to the installed transformers.
    """
    if family not in SUPPORTED:
        raise ValueError(f"family: expected one of {', '.join(SUPPORTED)}, got {family!r}")
    if family not in AVAILABLE:
        raise ValueError(f"family: transformers {transformers.__version__} has no {family}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(text_model_type(family), **(options_of(family) | options))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _remember_long(layer.linear_attn)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        compute_wide(model)
    return model  # type: ignore[no-any-return]


def options_of(family: str) -> dict[str, Any]:
    """Configuration of a tiny model of the family."""
    common = _COMMON | _OPTIONS.get(family, {})
    if "kv_lora_rank" in common:
        del common["head_dim"]  # of the part with RoPE there
    return common


def _remember_long(mixer: Any) -> None:
    """Heads that forget within ten to a thousand tokens: stock ones do within one or two, and a
    wrong state at a boundary would not show."""
    rates = torch.logspace(-3, -1, mixer.num_v_heads)
    mixer.A_log.data.copy_(rates.log())
