"""The demo's models: one function a family, from the tokens they must know to a configuration.

All are small enough for a minute or two of warm-up on two cores, and keep what sets their family
apart: layers that mix tokens in different ways, gates, experts, an indexer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

__all__ = ["FAMILIES", "Family"]

_COMMON: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
_LATENT: dict[str, Any] = _COMMON | dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=64,
    initializer_range=0.03,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


@dataclass(frozen=True, slots=True)
class Family:
    """How one family takes part in the demo.

    Attributes:
        config: from `vocab_size` and the ids of special tokens to the model's configuration.
        warm_up: the same for the warm-up where that is another model, whose weights fit.
        learning_rate: of the warm-up.
        dapo_learning_rate: of the run.
        steps: of the run.
        enough: the share of a note found at which the warm-up stops.
        confidence: the share of the last warm-up steps' answers that are not "unknown".
        prompt_tokens: the least length of its prompts; the longest are about 100 tokens longer.
        strategies: of `actor_rollout_ref.actor.strategy` that compute this family rightly.
    """

    config: Callable[..., PretrainedConfig]
    warm_up: Callable[..., PretrainedConfig] | None = None
    learning_rate: float = 2e-3
    dapo_learning_rate: float = 6e-4
    steps: int = 20
    enough: float = 0.88
    confidence: float = 0.35
    prompt_tokens: int = 2000
    strategies: tuple[str, ...] = ("longstraw", "fsdp2")


def qwen3(**tokens: Any) -> PretrainedConfig:
    """Two layers of attention, about 0.4 M parameters."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return AutoConfig.for_model(
        "qwen3",
        **_COMMON,
        **tokens,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=rope,
    )


def qwen3_5(**tokens: Any) -> PretrainedConfig:
    """A gated-delta-net layer, then one of gated attention; Qwen3.5 and 3.6 have three to one."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    return AutoConfig.for_model(
        "qwen3_5_text",
        **_COMMON,
        **tokens,
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters=rope,
    )


def glm_moe_dsa(**tokens: Any) -> PretrainedConfig:
    """Two layers of latent attention, one indexer for both, experts in the second.

    Each token attends to 128 of the 400 to 500 before it. The loss of the run gives an indexer no
    gradient, and one with random weights leaves out the notes; so the warm-up trains it on the
    attention of the same model without indexer (`indexer.py`), and the run leaves it as it is.
    Prompts are shorter than those of the other families because latent attention learns to look
    up more slowly: the warm-up reads 400 tokens in about the time in which Qwen3's reads 2,000.
    """
    return AutoConfig.for_model(
        "glm_moe_dsa",
        **_LATENT,
        **tokens,
        mlp_layer_types=["dense", "sparse"],
        index_topk=128,
        index_n_heads=8,
        index_head_dim=32,
        indexer_types=["full", "shared"],
    )


def glm_without_indexer(**tokens: Any) -> PretrainedConfig:
    """The same as DeepSeek-V3, which attends to all tokens: much faster to warm up."""
    return AutoConfig.for_model("deepseek_v3", **_LATENT, **tokens, first_k_dense_replace=1)


FAMILIES = {
    "qwen3": Family(qwen3),
    "qwen3_5": Family(qwen3_5, learning_rate=4e-3),
    # The stock attention of transformers 5.10 is not causal, so verl's own engine is no comparison.
    "glm_moe_dsa": Family(
        glm_moe_dsa,
        warm_up=glm_without_indexer,
        learning_rate=3e-3,
        dapo_learning_rate=4e-4,
        enough=0.75,
        confidence=0.2,
        prompt_tokens=400,
        strategies=("longstraw",),
    ),
}
