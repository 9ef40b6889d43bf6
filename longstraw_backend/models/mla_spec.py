"""Sizes and conventions of a latent-attention layer, from a Hugging Face configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["IndexSpec", "MlaSpec", "mla_spec"]


@dataclass(frozen=True)
class IndexSpec:
    """The indexer of a sparse layer.

    Attributes:
        heads: index heads H.
        dim: of a head and of the key; RoPE turns its first dims.
        k: tokens to select.
        interleaved: RoPE pairs neighbours (GLM) or halves (DeepSeek-V3.2).
    """

    heads: int
    dim: int
    k: int
    interleaved: bool


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention.

    Attributes:
        heads: N.
        nope: query and key dims without position.
        rope: query and key dims with RoPE, one key for all heads.
        value: value dims of a head.
        latent: width of the latent.
        scale: factor on the scores.
        interleaved: RoPE pairs neighbours (all checkpoints of these families) or halves.
        index: None without an indexer.
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    scale: float
    interleaved: bool
    index: IndexSpec | None


_INTERLEAVED_INDEX = {"glm_moe_dsa": True, "deepseek_v32": False}
"""By ``model_type``, of the published checkpoints; transformers 5.10 has GLM's wrong."""


def mla_spec(config: Any) -> MlaSpec:
    """Read glm_moe_dsa, deepseek_v32 or deepseek_v3.

    Raises:
        ValueError: an indexer of a family whose RoPE convention is not known.
    """
    return MlaSpec(
        heads=config.num_attention_heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        latent=config.kv_lora_rank,
        scale=_scale(config),
        interleaved=_interleaved(config),
        index=_index_spec(config),
    )


def _interleaved(config: Any) -> bool:
    """Only deepseek_v3 has a choice; the others' classes interleave, or should (GLM in 5.10)."""
    return config.model_type in _INTERLEAVED_INDEX or bool(getattr(config, "rope_interleave", True))


def _scale(config: Any) -> float:
    """(nope + rope)^-0.5, times the square of YaRN's mscale where mscale_all_dim is set.

    Not read from the module: transformers 5.10's GLM leaves the second factor out.
    """
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters or {}
    all_dim, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
    if rope.get("rope_type", "default") == "default" or not all_dim or factor <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(factor) + 1.0) ** 2


def _index_spec(config: Any) -> IndexSpec | None:
    if getattr(config, "index_topk", None) is None:
        return None
    if config.model_type not in _INTERLEAVED_INDEX:
        raise ValueError(
            f"model_type: {config.model_type!r} has an indexer whose RoPE convention is not known; "
            f"supported are {', '.join(_INTERLEAVED_INDEX)}"
        )
    return IndexSpec(
        heads=config.index_n_heads,
        dim=config.index_head_dim,
        k=config.index_topk,
        interleaved=_INTERLEAVED_INDEX[config.model_type],
    )
