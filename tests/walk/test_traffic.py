"""Bytes that ranks send each other: what is counted is what the formulas say, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longstraw_backend.compare.sides import replay_batch
from longstraw_backend.config import Gradient
from longstraw_backend.models.block_traffic import (
    Split,
    experts,
    has_experts,
    layer_bytes,
    log_probs,
)
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.parallel.experts import expert_parallel, owned_experts
from longstraw_backend.tiny import AVAILABLE, tiny_model
from longstraw_backend.walk import GroupWalk, Meter
from longstraw_backend.walk.update_traffic import (
    captured_token_bytes,
    replayed_token_bytes,
    update_bytes,
)
from tests.ranks import run_ranks
from tests.walk.cases import model, one_group, walk

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "by position": ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 1}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
MODES: list[tuple[Gradient, bool, list[int]]] = [
    ("response_only", False, [8]),
    ("exact", True, [16]),
]
"""And whether layers are recomputed, and responses: of one block, or of two."""
PROMPT, BLOCK = 17, 8
"""The first block selects fewer tokens than later ones."""
SIZES: dict[str, Any] = {"chunk_tokens": BLOCK, "prompt_block": BLOCK, "response_block": BLOCK}
ROWS = 8
"""Of experts, tokens of a rank."""


def _model(case: str) -> nn.Module:
    """In bfloat16, so that wide elements have another size."""
    family, options = FAMILIES[case]
    return model(family, torch.bfloat16, **options)


def _sent(
    case: str, gradient: Gradient, checkpointing: bool, responses: list[int], ranks: Ranks
) -> Meter:
    options: Any = dict(gradient=gradient, activation_checkpointing=checkpointing, **SIZES)
    one: GroupWalk = walk(_model(case), **options)
    meter = Meter()
    replay_batch(
        replace(one, model=replace(one.model, ranks=ranks)), *one_group(PROMPT, responses), meter
    )
    return meter


def _experts_sent(ranks: Ranks) -> tuple[int, int]:
    """Of one call's forward and backward, every expert chosen equally often."""
    module: Any = _experts_model().model.layers[-1].mlp.experts
    own = owned_experts(module.num_experts, ranks)
    for name, weight in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(weight.detach()[own.start : own.stop].clone()))
    x = torch.randn(ROWS, module.hidden_dim, dtype=torch.bfloat16, requires_grad=True)
    index = torch.arange(ROWS * 2).view(ROWS, 2) % module.num_experts
    out = expert_parallel(ranks)(module, x, index, torch.full((ROWS, 2), 0.5).bfloat16())
    forward = ranks.traffic.sent["experts"]
    out.float().square().sum().backward()
    return forward, ranks.traffic.sent["experts"] - forward


def _experts_model() -> Any:
    return tiny_model("qwen3_moe", dtype=torch.bfloat16, num_experts=8)


def _everything(rank: int) -> dict[int, dict[Any, Any]]:
    """By number of ranks: two pairs, then all four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {2: _counted(pairs[rank // 2]), 4: _counted(dist.group.WORLD)}


def _counted(group: dist.ProcessGroup | None) -> dict[Any, Any]:
    fresh = partial(Ranks.of, group)
    cases = [(case, *mode) for case in FAMILIES for mode in MODES]
    sent: dict[Any, Any] = {case[:2]: dict(_sent(*case, fresh()).sent) for case in cases}
    return sent | {"experts": _experts_sent(fresh())}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[Any, Any]]]:
    return run_ranks(_everything, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("gradient", "checkpointing", "responses"), MODES)
@pytest.mark.parametrize("case", FAMILIES)
def test_counted_is_what_the_formulas_say(
    results: list[dict[int, dict[Any, Any]]],
    world: int,
    case: str,
    gradient: Gradient,
    checkpointing: bool,
    responses: list[int],
) -> None:
    expected = update_bytes(
        _model(case).config,
        PROMPT,
        responses,
        Split(world),
        chunk=BLOCK,
        response_block=BLOCK,
        gradient=gradient,
        checkpointing=checkpointing,
    )
    for result in results:
        assert result[world][case, gradient] == expected


@pytest.mark.parametrize("world", [2, 4])
def test_experts_send_what_the_formula_says(
    results: list[dict[int, dict[Any, Any]]], world: int
) -> None:
    expected = experts(_experts_model().config, range(ROWS * world), Split(world, world))
    for result in results:
        assert result[world]["experts"] == expected[:2]


def test_one_rank_sends_nothing() -> None:
    metrics = _sent("qwen3", "exact", False, [8], Ranks()).metrics()
    sent = {name: value for name, value in metrics.items() if name.endswith("_bytes_sent")}
    phases = ("capture", "replay", "prompt_backward")
    assert sent == {f"longstraw/{phase}_bytes_sent": 0.0 for phase in phases}


@pytest.mark.parametrize("family", AVAILABLE)
def test_layers_with_experts_are_found(family: str) -> None:
    stock: Any = tiny_model(family)
    found = [hasattr(layer.mlp, "experts") for layer in stock.model.layers]
    assert list(has_experts(stock.config)) == found


def test_tokens_add_up_over_layers() -> None:
    config, split, block = _experts_model().config, Split(4, 4), range(64, 128)
    layers = [s for layer in layer_bytes(config, block, split) for s in layer.values()]
    captured = captured_token_bytes(config, 4, 4, chunk=64)
    assert captured.keys() == {"attention", "experts"}
    assert sum(captured.values()) * 64 == sum(s.forward for s in layers)
    options: Any = dict(gradient="exact", checkpointing=True, block=64)
    replayed = replayed_token_bytes(config, 4, 4, **options)
    once = sum((1 if s.kept else 2) * s.forward + s.backward for s in layers)
    assert sum(replayed["prompt"].values()) * 64 == once
    assert sum(replayed["response"].values()) * 64 == once + log_probs(block, split)


def test_refuses_a_block_that_ranks_cannot_share_evenly() -> None:
    with pytest.raises(ValueError, match="block: expected a multiple of 4 tokens, .* got 6"):
        layer_bytes(_experts_model().config, range(6), Split(4))
