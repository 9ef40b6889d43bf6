"""Experts owned by 2 and 4 ranks against the stock eager forward on one, with all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.parallel.experts import expert_parallel, owned_experts, shard_experts
from longstraw_backend.tiny import AVAILABLE, options_of, tiny_model
from tests.ranks import run_ranks

FAMILIES = "qwen3_moe", "qwen3_5_moe", "glm_moe_dsa"
OTHERS = "qwen3_next", "deepseek_v32", "deepseek_v3"
EXPERTS, HIDDEN = 8, 64
TOKENS = {2: [(7, 12), (0, 9)], 4: [(5, 0, 3, 8), (0, 0, 1, 0)]}
"""Of each rank. Few of them leave experts, and owners of experts, without a token."""
LOADS = "random", "one expert", "idle owners"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
CASES = [(f, torch.float64) for f in FAMILIES] + [("qwen3_moe", torch.float32)]
Values = dict[str, Tensor]


def build(family: str, dtype: torch.dtype) -> Any:
    count = "num_experts" if "num_experts" in options_of(family) else "n_routed_experts"
    model: Any = tiny_model(family, dtype=dtype, **{count: EXPERTS})
    model.set_experts_implementation("eager")
    return model


def block_of(model: Any) -> Any:
    """The last layer's router and experts, and the shared expert where there is one."""
    return model.model.layers[-1].mlp


def tokens(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and cotangents, [count, H]."""
    g = torch.Generator().manual_seed(count)
    x, dx = torch.randn(2, count, HIDDEN, generator=g, dtype=torch.float64)
    return x.to(dtype), dx.to(dtype)


def routed(load: str, count: int) -> tuple[Tensor, Tensor]:
    """Experts and their weights, [count, k]."""
    g = torch.Generator().manual_seed(count)
    weights = torch.rand(count, 1 if load == "one expert" else 3, generator=g, dtype=torch.float64)
    if load == "one expert":
        return torch.full((count, 1), 5), weights
    among = EXPERTS if load == "random" else EXPERTS // 2
    return torch.rand(count, among, generator=g).argsort(1)[:, :3], weights


def cut(whole: Tensor, counts: tuple[int, ...], rank: int) -> Tensor:
    end = list(accumulate(counts))[rank]
    return whole[end - counts[rank] : end].clone()


def run_block(block: Any, x: Tensor, dx: Tensor) -> Values:
    x = x.clone().requires_grad_()
    block.zero_grad()
    out = block(x[None])[0]
    out.backward(dx)
    assert x.grad is not None
    grads = {name: p.grad for name, p in block.named_parameters()}
    return {"out": out.detach(), "dx": x.grad} | grads


def run_experts(
    experts: Any, x: Tensor, index: Tensor, weights: Tensor, dx: Tensor, forward: Any = None
) -> Values:
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    experts.zero_grad()
    out = (forward or experts)(leaves[0], index, leaves[1])
    out.backward(dx)
    grads = {name: p.grad.clone() for name, p in experts.named_parameters()}
    return {"out": out.detach(), "dx": leaves[0].grad, "dweights": leaves[1].grad} | grads


def on_ranks(rank: int, world: int) -> dict[Any, Any]:
    ranks = Ranks.of(dist.group.WORLD)
    ALL_EXPERTS_FUNCTIONS.register("owned", expert_parallel(ranks))
    blocks = {(*c, t): owned_block(*c, t, ranks) for c in CASES for t in TOKENS[world]}
    loads = {(load, t): owned_module(load, t, ranks) for load in LOADS for t in TOKENS[world]}
    return blocks | loads | {"sharded": sharded()}


def owned_block(
    family: str, dtype: torch.dtype, counts: tuple[int, ...], ranks: Ranks
) -> dict[str, Any]:
    """Through transformers' registry, with DTensors."""
    model = build(family, dtype)
    shard_experts(model, init_device_mesh("cpu", (ranks.size,)))
    model.set_experts_implementation("owned")
    x, dx = (cut(t, counts, ranks.rank) for t in tokens(sum(counts), dtype))
    values = run_block(block_of(model), x, dx)
    with torch.no_grad():
        scored = block_of(model)(x[None])[0]
    again = run_block(block_of(model), x, dx)
    local = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}
    return local | {
        "scored": torch.equal(scored, values["out"]),
        "repeated": all(torch.equal(_local(again[n]), _local(v)) for n, v in values.items()),
    }


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def owned_module(load: str, counts: tuple[int, ...], ranks: Ranks) -> Values:
    """In place of one module's forward, with plain tensors."""
    experts = block_of(build("qwen3_moe", torch.float64)).experts
    own = slice(owned_experts(EXPERTS, ranks).start, owned_experts(EXPERTS, ranks).stop)
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(weight.detach()[own].clone()))
    experts.forward = MethodType(expert_parallel(ranks), experts)
    x, dx = tokens(sum(counts), torch.float64)
    parts = (cut(t, counts, ranks.rank) for t in (x, *routed(load, sum(counts)), dx))
    return run_experts(experts, *parts)


def sharded() -> dict[str, Any]:
    """What a model's parameters and state dict are before and after."""
    model = build("glm_moe_dsa", torch.float32)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model.model.layers[-1].mlp.experts.down_proj.requires_grad_(False)
    names = shard_experts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    after = model.state_dict()
    whole = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in after.items()}
    model.load_state_dict(after)
    return {
        "refused": [refusal(gpt_oss()), refusal(tiny_model("qwen3"))],
        "names": names,
        "local": [len(_local(after[name])) for name in names],
        "trained": [model.get_parameter(name).requires_grad for name in names],
        "same": before.keys() == whole.keys()
        and all(torch.equal(before[name], w) for name, w in whole.items()),
    }


def gpt_oss() -> Any:
    sizes = dict(num_hidden_layers=1, hidden_size=HIDDEN, num_local_experts=EXPERTS, vocab_size=16)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes))


def refusal(model: nn.Module) -> str:
    try:
        shard_experts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    except ValueError as error:
        return str(error)
    return "none"


@pytest.fixture(scope="module", params=sorted(TOKENS), ids="{} ranks".format)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[Any, Any]]]:
    world = request.param
    yield run_ranks(partial(on_ranks, world=world), world, tmp_path_factory.mktemp("ranks"))


def close(actual: Tensor, expected: Tensor) -> None:
    """Relative to the largest element: rows are batched differently, so terms round differently."""
    bound = TOLERANCE[expected.dtype] * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_blocks_match_one_rank(results: list[Any], family: str, dtype: torch.dtype) -> None:
    for counts in TOKENS[len(results)]:
        expected = run_block(block_of(build(family, dtype)), *tokens(sum(counts), dtype))
        found = [r[family, dtype, counts] for r in results]
        for name, value in expected.items():
            parts = [f[name] for f in found]
            if name in ("out", "dx"):
                close(torch.cat(parts), value)
            elif name.startswith("experts."):  # whole, gathered
                close(parts[0], value)
            else:
                close(torch.stack(parts).sum(0), value)


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_score_and_replay_agree_to_the_bit(
    results: list[Any], family: str, dtype: torch.dtype
) -> None:
    for counts in TOKENS[len(results)]:
        found = [r[family, dtype, counts] for r in results]
        assert all(f["scored"] and f["repeated"] for f in found)


@pytest.mark.parametrize("load", LOADS)
def test_loads_match_one_rank(results: list[Any], load: str) -> None:
    experts = block_of(build("qwen3_moe", torch.float64)).experts
    for counts in TOKENS[len(results)]:
        x, dx = tokens(sum(counts), torch.float64)
        expected = run_experts(experts, x, *routed(load, sum(counts)), dx)
        for name, value in expected.items():
            close(torch.cat([r[load, counts][name] for r in results]), value)


def test_sharded_models_keep_their_state_dict(results: list[Any]) -> None:
    names = [f"model.layers.3.mlp.experts.{kind}" for kind in ("gate_up_proj", "down_proj")]
    local = [EXPERTS // len(results)] * 2
    expected = {"names": names, "local": local, "trained": [True, False], "same": True}
    for found in (r["sharded"] for r in results):
        other, dense = found.pop("refused")
        assert found == expected
        assert other.startswith("model.layers.0.mlp.experts: expected experts with gate_up_proj")
        assert dense.startswith("model: expected fused experts, Qwen3ForCausalLM has none")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHERS} & {*AVAILABLE}))
def test_one_rank_matches_stock(family: str, load: str) -> None:
    experts = block_of(build(family, torch.float64)).experts
    x, dx = tokens(11, torch.float64)
    args = experts, x, *routed(load, 11), dx
    expected = run_experts(*args)
    actual = run_experts(*args, partial(expert_parallel(Ranks()), experts))
    for name, value in expected.items():
        close(actual[name], value)


def test_one_rank_has_the_bits_of_stock_grouped_experts_in_bfloat16() -> None:
    """A score of ours and of an unwrapped model differ by nothing."""
    model = build("qwen3_moe", torch.bfloat16)
    experts = block_of(model).experts
    model.set_experts_implementation("grouped_mm")
    x, _ = tokens(300, torch.bfloat16)
    index, weights = routed("random", 300)
    for dtype in (torch.bfloat16, torch.float32):
        args = experts, x, index, weights.to(dtype)
        assert torch.equal(expert_parallel(Ranks())(*args), experts(*args[1:]))


def test_refuses_other_layouts_and_whole_experts() -> None:
    x, _ = tokens(3, torch.float32)
    routing = routed("random", 3)
    with pytest.raises(ValueError, match="GptOssExperts: .* got transposed weights, biases"):
        expert_parallel(Ranks())(block_of(gpt_oss()).experts, x, *routing)
    experts = block_of(build("qwen3_moe", torch.float32)).experts
    with pytest.raises(ValueError, match="gate_up_proj: expected the 4 experts .* got 8"):
        expert_parallel(Ranks(None, 0, 2))(experts, x, *routing)
    with pytest.raises(ValueError, match="divides 8 experts, got 3"):
        expert_parallel(Ranks(None, 0, 3))(experts, x, *routing)
