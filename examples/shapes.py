"""The two large models of the examples: text configurations by published sizes, and their ranks.

Qwen3.6-27B: hidden 5,120, 64 layers of which every fourth is full attention. GLM-5.2: hidden 6,144,
78 layers, the first three without experts, 21 with an indexer (index_topk_freq 4, offset 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_backend.models.index_share import indexer_schedule

__all__ = ["SHAPES", "Shape", "num_parameters"]


@dataclass(frozen=True)
class Shape:
    """A model and how its overlay in ``configs/longstraw`` splits it.

    Attributes:
        config: Hugging Face configuration of the text model.
        ranks: that share a prompt.
        expert_ranks: that share a layer's experts.
        chunk: prompt tokens of a block.
    """

    config: Any
    ranks: int
    expert_ranks: int
    chunk: int


SHAPES = {
    "Qwen3.6-27B": Shape(
        AutoConfig.for_model(
            "qwen3_5_text",
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
        ranks=8,
        expert_ranks=1,
        chunk=32768,
    ),
    "GLM-5.2": Shape(
        AutoConfig.for_model(
            "glm_moe_dsa",
            vocab_size=154880,
            hidden_size=6144,
            intermediate_size=12288,
            num_hidden_layers=78,
            num_attention_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=2048,
            indexer_types=indexer_schedule(78, freq=4, offset=3),
            index_skip_topk_offset=3,
            mlp_layer_types=["dense"] * 3 + ["sparse"] * 75,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
        ),
        ranks=32,
        expert_ranks=32,
        chunk=131072,
    ),
}


def num_parameters(config: Any, *, routed_experts: bool) -> int:
    """Of the text model, with or without the experts that tokens are routed to."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if routed_experts or ".mlp.experts." not in name
    )
