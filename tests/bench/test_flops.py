"""Formulas of floating-point operations against what torch counts in runs of tiny models.

Torch has no count for CPU attention, triangular solves and grouped products: they get theirs here,
from the shapes they are called with. The formulas may be 1 % off a forward: they leave out norms'
and gates' few products. What kernels make beyond what is needed is said where it is allowed for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstraw_backend.bench.flops import Flops, Training, capture_flops, replay_flops
from longstraw_backend.bench.shapes import config_of, random_model
from longstraw_backend.compare.inputs import add_adapters
from longstraw_backend.models import DrivenModel, drive
from longstraw_backend.models.sizes import ModelSizes, num_routed
from longstraw_backend.state import Segment
from longstraw_backend.tiny import AVAILABLE
from longstraw_backend.walk import Block, advance, predict

CONTEXT, TOKENS = 256, 128  # whole chunks of the delta rule
FAMILIES = [
    name
    for name in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v3")
    if name in AVAILABLE
]


def _attention(
    q: Any, k: Any, v: Any, _: float = 0.0, causal: bool = False, *args: Any, **kw: Any
) -> int:
    rows, heads, queries, width = q
    pairs = queries * (queries + 1) // 2 if causal else queries * k[2]
    return 2 * rows * heads * pairs * (width + v[3])


def _attention_back(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, _: float, causal: bool, **kw: Any
) -> int:
    return _attention(q, k, v, 0.0, causal) // 2 * 5


def _solve(a: Any, b: Any, **kw: Any) -> int:
    return int(torch.Size(b).numel()) * a[-1]


def _grouped(x: Any, weight: Any, *args: Any, **kw: Any) -> int:
    return 2 * x[0] * x[1] * weight[-1]


def _convolution_back(dout: Any, x: Any, weight: Any, *args: Any, **kw: Any) -> int:
    return 4 * int(torch.Size(dout).numel()) * weight[-1]  # torch's count overlooks groups


def counted(work: Any) -> int:
    """FLOPs of what runs inside."""
    aten = torch.ops.aten
    own = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back,
        aten.linalg_solve_triangular: _solve,
        aten._grouped_mm: _grouped,
        aten.convolution_backward: _convolution_back,
        torch.ops.transformers.grouped_mm_fallback: _grouped,
    }
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        work()
    return int(counter.get_total_flops())


def _model(family: str) -> tuple[Any, ModelSizes, DrivenModel, Segment]:
    config = config_of(f"tiny-{family}")
    model = drive(random_model(config, "cpu", "float32"))
    segment = model.segment(CONTEXT + TOKENS, 4096)
    with torch.no_grad():
        advance(model, torch.zeros(1, CONTEXT, dtype=torch.long), segment)
    return config, ModelSizes.of(config), model, segment


def _block() -> Block:
    tokens = torch.arange(TOKENS) % 200
    return Block(tokens, tokens, 1.0, False, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_chunk_has_the_products_of_the_formula(family: str) -> None:
    config, sizes, model, segment = _model(family)
    tokens = torch.arange(TOKENS)[None] % 200
    with torch.no_grad():
        found = counted(lambda: advance(model, tokens, segment))
    formula = capture_flops(config, sizes, CONTEXT, CONTEXT + TOKENS)
    assert formula.total * 0.99 <= found <= formula.total * 1.01 + _surplus(config, formula)


def _surplus(config: Any, made: Flops) -> float:
    """Products that kernels make and nothing needs: index scores are made of whole blocks of keys,
    and dense latent attention has values as wide as keys."""
    if config.model_type == "glm_moe_dsa":
        return made.index
    if config.model_type == "deepseek_v3":
        key, value = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
        return (made.pages + made.causal) * ((2 * key) / (key + value) - 1)
    return 0.0


def _backward(config: Any, model: DrivenModel) -> tuple[int, int]:
    """FLOPs of a replay's forward, and of its backward, with checkpointing."""
    segment = model.segment(CONTEXT, 4096, cotangents=torch.float32)
    with torch.no_grad():
        advance(model, torch.zeros(1, CONTEXT, dtype=torch.long), segment)
    outs: list[Any] = []

    def forward() -> None:
        outs.append(predict(model, _block(), segment, grad=True, checkpointing=True))

    return counted(forward), counted(lambda: outs[0].log_probs.sum().backward())


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_has_the_products_of_the_formula(family: str, lora: int) -> None:
    config, sizes, model, _ = _model(family)
    if lora:
        pytest.importorskip("peft")
        plain = add_adapters(model.module, lora, 0, experts=not num_routed(config))
        model = replace(model, module=plain)
    found = _backward(config, model)
    ahead, again, back = replay_flops(config, sizes, CONTEXT, TOKENS, Training("exact", lora))
    assert ahead.total * 0.99 <= found[0] <= ahead.total * 1.01 + _surplus(config, ahead)
    both = again + back
    # torch ends a recomputation when it has what the backward needs: before a layer's last product
    last = 2 * TOKENS * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    most = both.total * 1.01 + _surplus(config, again) + _surplus(config, back)
    # with adapters the first layer has no gradient of its input
    assert both.total * (0.97 if lora else 0.99) - last <= found[1] <= most


def test_a_constant_state_spares_the_gradients_of_pages() -> None:
    config = config_of("tiny-qwen3")
    sizes = ModelSizes.of(config)
    exact, constant = (
        replay_flops(config, sizes, CONTEXT, TOKENS, Training(gradient))[2]
        for gradient in ("exact", "response_only")
    )
    products = 2 * 2 * CONTEXT * TOKENS * config.num_attention_heads * config.head_dim
    assert exact.total - constant.total == products * config.num_hidden_layers
