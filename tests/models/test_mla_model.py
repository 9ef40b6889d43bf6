"""Whole stock models with our attention: chunks, shared selections, checkpoints, causality.

State is a plain dictionary here; the walk's own is tested where it lives.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from longstraw_backend.kernels.index_topk import scores
from longstraw_backend.models.drive import ATTENTION
from longstraw_backend.models.mla import MlaOutput
from longstraw_backend.models.mla_forward import replace_attention
from tests.models.mla_layers import INDEX, SIZES, randomise, relative

TOKENS = 70
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm, all full": ("glm_moe_dsa", {}),
    "glm, FSSF": ("glm_moe_dsa", dict(index_topk_pattern="FSSF")),
    "glm, every second": ("glm_moe_dsa", dict(index_topk_freq=2)),
    "glm, one for all": ("glm_moe_dsa", dict(indexer_types=["full"] + ["shared"] * 3)),
    "V3.2": ("deepseek_v32", {}),
    "V3": ("deepseek_v3", dict(first_k_dense_replace=1)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class WideRouter:
    """torch.nn.functional with linear layers of float32 inputs made in float64.

    Stock routers multiply in float32 whatever the model's dtype, and a float32 product of one token
    differs in its last bit from that of many: 1e-7 in log-probs, which hides everything else.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.double(), weight.double())


@pytest.fixture(autouse=True)
def wide_router(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in {family for family, _ in CASES.values()} & set(CONFIG_MAPPING):
        stock = import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(stock, "F", WideRouter())


class Pages:
    """State of one path; ``keep`` is whether new tokens stay."""

    def __init__(self) -> None:
        self.keep = True
        self.kept: dict[int, list[tuple[Tensor, Tensor | None]]] = defaultdict(list)
        self.selections: dict[int, Tensor] = {}

    def latents(self, layer: int) -> list[Tensor]:
        return [latents for latents, _ in self.kept[layer]]

    def index_keys(self, layer: int) -> list[Tensor]:
        return [keys for _, keys in self.kept[layer] if keys is not None]

    def selection(self, layer: int) -> Tensor | None:
        return self.selections.get(layer)

    def receive(self, layer: int, out: MlaOutput) -> None:
        if out.selection is not None:
            self.selections[layer] = out.selection
        if self.keep:
            self.kept[layer].append((out.latents.detach(), out.index_keys))


def make_model(family: str, options: dict[str, Any]) -> Any:
    """A stock model of four layers, with routed experts in the last."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    moe = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1)
    sizes = SIZES | moe | dict(num_hidden_layers=4, vocab_size=97, intermediate_size=40)
    sizes |= dict(moe_intermediate_size=24, pad_token_id=None)
    sizes |= INDEX if family != "deepseek_v3" else {}
    config = AutoConfig.for_model(family, **(sizes | options))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.15)
    randomise(model)
    model.to(torch.float64).eval().set_experts_implementation("eager")
    return model


def driven(case: tuple[str, dict[str, Any]]) -> Any:
    model = make_model(*case)
    model.set_attn_implementation(ATTENTION)
    replace_attention(model, lambda walk: walk)
    return model


def tokens_of(seed: int = 3) -> Tensor:
    return torch.randint(97, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, tokens: Tensor, sizes: tuple[int, ...]) -> Tensor:
    state, start, outs = Pages(), 0, []
    for size in sizes:
        outs.append(step(model, tokens[:, start : start + size], start, state))
        start += size
    return torch.cat(outs, 1)


def step(model: Any, tokens: Tensor, start: int, state: Pages) -> Tensor:
    state.selections.clear()
    positions = torch.arange(start, start + tokens.shape[1])[None]
    out: Tensor = model(
        input_ids=tokens, position_ids=positions, use_cache=False, longstraw=state
    ).logits
    return out


@each_case
@pytest.mark.parametrize("sizes", [(64, 6), (23, 1, 46), (3, 5, 7, 11, 44)])
def test_chunks_equal_one_pass(case: tuple[str, dict[str, Any]], sizes: tuple[int, ...]) -> None:
    model = driven(case)
    with torch.no_grad():
        whole, cut = (logits(model, tokens_of(), s) for s in ((TOKENS,), sizes))
    assert (cut - whole).abs().max() <= 1e-9


@each_case
def test_one_pass_equals_stock(case: tuple[str, dict[str, Any]]) -> None:
    """Where stock is right: DeepSeek-V3 everywhere, the sparse families from 5.17 on."""
    if case[0] != "deepseek_v3" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip(f"stock DSA is wrong in transformers {transformers.__version__}")
    with torch.no_grad():
        stock = make_model(*case)(input_ids=tokens_of()).logits
        ours = logits(driven(case), tokens_of(), (23, 1, 46))
    assert (ours - stock).abs().max() <= 1e-9


@each_case
def test_last_token_changes_no_logit_before_it(case: tuple[str, dict[str, Any]]) -> None:
    model, tokens = driven(case), tokens_of()
    with torch.no_grad():
        before = logits(model, tokens, (TOKENS,))
        tokens[0, -1] = (tokens[0, -1] + 1) % 97
        after = logits(model, tokens, (TOKENS,))
    assert torch.equal(before[:, :-1], after[:, :-1])


@each_case
def test_checkpointed_layers_give_the_same_gradient_and_score_once(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, calls = driven(case), tokens_of(), [0]
    count_calls(monkeypatch, calls)
    state = Pages()
    with torch.no_grad():
        step(model, tokens[:, :50], 0, state)
    state.keep = False
    grads, made = [], []
    for _ in range(2):
        calls[0] = 0
        model.zero_grad(set_to_none=True)
        step(model, tokens[:, 50:], 50, state).sin().sum().backward()
        grads.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        made.append(calls[0])
        for layer in model.model.layers:
            layer.forward = partial(checkpointed, layer.forward)
    assert relative(grads[1], grads[0]) <= 1e-14
    assert made[0] == made[1]


def count_calls(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    from longstraw_backend.kernels.index_topk import api

    def counted(*args: Any) -> Tensor:
        calls[0] += 1
        return scores.block_scores(*args)

    monkeypatch.setattr(api, "block_scores", counted)


def checkpointed(forward: Any, hidden: Tensor, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), hidden, use_reentrant=False)


def test_a_call_without_a_walk_is_refused() -> None:
    model = driven(CASES["V3"])
    with pytest.raises(ValueError, match="expected a walk and no mask"):
        model(input_ids=tokens_of(), use_cache=False)
