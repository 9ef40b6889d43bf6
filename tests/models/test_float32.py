"""Router biases and indexer weights keep float32 through casts, mixed precision and autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from longstraw_backend.models.float32 import keep_float32, reload_float32
from tests.ranks import run_ranks

from .wrapped import save_latent, weights_of

FAMILIES = ("glm_moe_dsa", "deepseek_v3")
KEPT = ("e_score_correction_bias", "indexer.weights_proj.weight")


@pytest.fixture(params=FAMILIES)
def folder(request: Any, tmp_path: Path) -> Path:
    save_latent(request.param, tmp_path)
    return tmp_path


def _loaded(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


def _kept(model: nn.Module) -> dict[str, Tensor]:
    found = {n: t.clone() for n, t in model.state_dict().items() if n.endswith(KEPT)}
    assert found
    return found


def _assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu")]
)
def test_casts_pass_them_by(folder: Path, cast: Callable[[nn.Module], nn.Module]) -> None:
    model = _loaded(folder)
    names, before = list(model.state_dict()), _kept(model)
    keep_float32(model)
    cast(model)
    _assert_equal(_kept(model), before)
    assert sorted(model.state_dict()) == sorted(names)
    model.load_state_dict(_loaded(folder).state_dict())


def test_float64_models_are_wide_throughout(folder: Path) -> None:
    model = _loaded(folder)
    keep_float32(model)
    model.double()
    assert all(t.dtype == torch.float64 for t in _kept(model).values())


def test_values_rounded_by_the_host_are_read_again(folder: Path) -> None:
    """As a host does that casts what it loaded."""
    model = _loaded(folder, torch.bfloat16).to(torch.bfloat16)
    keep_float32(model)
    reload_float32(model, folder)
    published = weights_of(folder)
    _assert_equal(_kept(model), {name: published[name] for name in _kept(model)})
    assert model.get_parameter("model.embed_tokens.weight").dtype == torch.bfloat16


def test_another_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    model = _loaded(folder)
    keep_float32(model)
    with pytest.raises(ValueError, match=r"has no model\.layers"):
        reload_float32(model, tmp_path / "nowhere")


def test_routers_choose_in_float32_under_autocast(folder: Path) -> None:
    model = _loaded(folder)
    gate = model.get_submodule("model.layers.1.mlp.gate")
    hidden = torch.randn(1, 64, 48)
    expected = gate(hidden)
    keep_float32(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gate(hidden), expected, atol=0, rtol=0)


def test_models_without_them_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    keep_float32(model)
    assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16


def _sharded(rank: int, folder: str) -> tuple[dict[str, Tensor], list[Any]]:
    """What forwards of a model sharded with mixed precision see."""
    model: Any = _loaded(Path(folder))
    keep_float32(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    seen = []

    def record(layer: Any, *_: Any) -> None:
        seen.append(layer.self_attn.indexer.weights_proj.weight.dtype)
        seen.append(layer.self_attn.o_proj.weight.dtype)
        if hasattr(layer.mlp, "gate"):
            seen.append(layer.mlp.gate.e_score_correction_bias.dtype)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(partial(record, layer))
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(20)[None])
    return _kept(model), seen


def test_mixed_precision_of_sharded_models_passes_them_by(tmp_path: Path) -> None:
    save_latent("glm_moe_dsa", tmp_path)
    before, out = _kept(_loaded(tmp_path)), tmp_path / "ranks"
    out.mkdir()
    for kept, seen in run_ranks(partial(_sharded, folder=str(tmp_path)), 2, out):
        _assert_equal(kept, before)
        assert seen.count(torch.bfloat16) == 3, "one o_proj a layer"
        assert seen.count(torch.float32) == 5
