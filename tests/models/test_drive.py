"""Driving a stock module: what it refuses, and that nothing else of it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from longstraw_backend.models import check_supported, drive
from longstraw_backend.models.families import check_no_dropout, check_routers
from longstraw_backend.oracle_delta_net import gated_delta_nets
from longstraw_backend.oracle_latent import latent_attentions
from longstraw_backend.tiny import AVAILABLE, tiny_model
from longstraw_backend.walk import advance
from longstraw_backend.walk.heads import last_logits

TOKENS = torch.arange(1, 12)[None]


@pytest.mark.parametrize("family", AVAILABLE)
def test_call_without_a_walk_raises(family: str) -> None:
    model = drive(tiny_model(family)).module
    with pytest.raises(ValueError, match="driven by longstraw"):
        model(input_ids=TOKENS, position_ids=torch.arange(11)[None])


def test_inner_model_without_a_walk_raises() -> None:
    driven: Any = drive(tiny_model("qwen3")).module
    with pytest.raises((ValueError, KeyError), match="longstraw"):
        driven.model(input_ids=TOKENS)


@pytest.mark.parametrize("family", AVAILABLE)
def test_one_block_gives_the_stock_logits(family: str) -> None:
    stock = tiny_model(family, dtype=torch.float64, initializer_range=0.1)
    with gated_delta_nets(stock, None), latent_attentions(stock, None):
        expected = stock(input_ids=TOKENS).logits[:, -1]
    driven = drive(stock)
    (found,) = advance(driven, TOKENS, driven.segment(0, 1), commit=False, head=last_logits)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", AVAILABLE)
def test_weights_keep_their_names_and_values(family: str) -> None:
    before = tiny_model(family).state_dict()
    after = drive(tiny_model(family)).module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_wrapper_is_called_in_place_of_the_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, **inputs: Any) -> Any:
            self.calls += 1
            return self.inner(**inputs)

    bare = drive(tiny_model("llama"))
    wrapped = replace(bare, module=Wrapper(bare.module))
    advance(wrapped, TOKENS, wrapped.segment(11, 16))
    assert wrapped.module.calls == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "options", "name"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "sliding"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_refuses_an_option_by_name(family: str, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        drive(tiny_model(family, **options))


def test_refuses_a_family_by_name() -> None:
    class Config:
        model_type = "mamba"

    with pytest.raises(ValueError, match="'mamba'.*llama, qwen2, qwen3, qwen3_moe"):
        check_supported(Config())
    with pytest.raises(ValueError, match="family.*'mamba'"):
        tiny_model("mamba")


def test_refuses_dropout_of_an_adapter_by_name() -> None:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(ValueError, match="lora_dropout.*p=0.1"):
        check_no_dropout(get_peft_model(tiny_model("llama"), options))


def test_refuses_an_output_bias() -> None:
    model: Any = tiny_model("llama")
    model.lm_head = nn.Linear(64, 311, bias=True)
    with pytest.raises(ValueError, match="lm_head.*bias"):
        drive(model)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32", "deepseek_v3"])
def test_latent_attention_gives_the_logits_of_stock_modules(family: str) -> None:
    """Where these are right: dense ones always, sparse ones from transformers 5.17 on."""
    if family not in AVAILABLE:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family != "deepseek_v3" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip(f"stock DSA is wrong in transformers {transformers.__version__}")
    stock = tiny_model(family, dtype=torch.float64, initializer_range=0.1)
    tokens = torch.arange(1, 71)[None]
    expected = stock(input_ids=tokens).logits[:, -1]
    driven = drive(stock)
    segment = driven.segment(70, 16)
    for block in tokens.split([23, 1, 45, 1], dim=1):
        out = advance(driven, block, segment, head=last_logits)
    assert torch.allclose(out[0], expected, rtol=0, atol=1e-9)


def test_an_adapter_that_hides_a_correction_bias_is_refused() -> None:
    hidden = tiny_model("deepseek_v3")
    gate: Any = hidden.model.layers[3].mlp.gate  # type: ignore[union-attr]
    wrapper = nn.Module()
    wrapper.base_layer = gate
    hidden.model.layers[3].mlp.gate = wrapper  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="target_modules"):
        check_routers(hidden)
