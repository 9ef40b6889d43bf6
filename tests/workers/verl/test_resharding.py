"""Shards put together: of meshes with experts and with replicas, uneven, empty, or wrong."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from longstraw_backend.workers.verl.resharding import (
    copy_shards,
    load_model,
    load_optimizer,
    shard_spans,
)
from longstraw_backend.workers.verl.shard_files import read_shards, saved_world_size
from tests import ranks

EXPERTS = {"even": (8, 3), "uneven": (6, 3, 2), "empty": (2, 5)}
OTHERS = {"rows": (5, 3), "row": (1, 4)}


def _module(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        draw = torch.Generator().manual_seed(sum(shape))
        module.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw)))
    module.register_buffer("scale", torch.arange(3.0))
    return module


def _plain() -> nn.Module:
    return nn.ModuleDict({"experts": _module(EXPERTS), "others": _module(OTHERS)})


def _sharded() -> nn.Module:
    """On 4 ranks: experts cut by ep and then efsdp, other weights in two replicas of two shards."""
    whole: Any = _plain()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for name, weight in list(whole["experts"].named_parameters()):
        cut = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])
        whole["experts"].register_parameter(name, nn.Parameter(cut))
    fully_shard(whole["experts"], mesh=mesh["efsdp"])
    fully_shard(
        whole["others"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    )
    return whole  # type: ignore[no-any-return]


def _step(module: nn.Module) -> torch.optim.Optimizer:
    """Weights and both moments differ in every element, and do not depend on the layout."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return optimizer


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _save_and_load(folder: str, rank: int) -> list[Any]:
    module = _sharded()
    optimizer = _step(module)
    for kind, state in [("model", module.state_dict()), ("optim", optimizer.state_dict())]:
        torch.save(state, f"{folder}/{kind}_world_size_4_rank_{rank}.pt")
    whole = _plain()
    trained = _step(whole)
    again = _sharded()
    load_model(again, [whole.state_dict()], partial=False)
    loaded = torch.optim.AdamW(again.parameters())
    names = {p: n for n, p in again.named_parameters()}
    load_optimizer(loaded, names, [trained.state_dict()])
    dist.barrier()
    pairs = [
        *zip(module.state_dict().values(), again.state_dict().values(), strict=True),
        *zip(_states(optimizer), _states(loaded), strict=True),
    ]
    equal = all(torch.equal(_local(a), _local(b)) for a, b in pairs)
    placed = all(getattr(a, "placements", 0) == getattr(b, "placements", 0) for a, b in pairs)
    uneven: Any = module.get_submodule("experts").get_parameter("uneven")
    return [equal, placed, str(uneven.placements), tuple(uneven.to_local().shape)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder, out = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("out")
    return folder, ranks.run_ranks(partial(_save_and_load, str(folder)), 4, out)


def test_whole_tensors_are_cut_for_experts_and_replicas(saved: tuple[Path, list[Any]]) -> None:
    for equal, placed, placements, _ in saved[1]:
        assert equal and placed
        assert placements == str((_StridedShard(0, split_factor=2), Shard(0)))
    assert [shape for *_, shape in saved[1]] == [(2, 3, 2), (2, 3, 2), (1, 3, 2), (1, 3, 2)]


def test_shards_of_experts_and_replicas_become_whole(saved: tuple[Path, list[Any]]) -> None:
    expected, found = _plain(), _plain()
    trained = _step(expected)
    optimizer = torch.optim.AdamW(found.parameters())
    with torch.no_grad():
        for tensor in found.state_dict().values():
            tensor.fill_(-1)
    load_model(found, read_shards(saved[0], "model", 4), partial=False)
    names = {p: n for n, p in found.named_parameters()}
    load_optimizer(optimizer, names, read_shards(saved[0], "optim", 4))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert all(map(torch.equal, _states(optimizer), _states(trained)))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_spans_cover_a_tensor_once() -> None:
    placements = [Replicate(), _StridedShard(0, split_factor=3), Shard(0), Shard(1)]
    seen = torch.zeros(7, 5)
    for index in torch.cartesian_prod(*map(torch.arange, (1, 2, 3, 2))).tolist():
        (a, b), (c, d) = shard_spans((7, 5), placements, (1, 2, 3, 2), index)
        seen[a:b, c:d] += 1
    assert (seen == 1).all()
    assert shard_spans((8,), placements[1:3], (2, 3), (1, 0)) == ((2, 3),)


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=3)])
def test_other_placements_are_refused(placement: Any) -> None:
    with pytest.raises(ValueError, match="placements: .* resume on the saved number of ranks"):
        shard_spans((4,), [placement, Shard(0)], (2, 2), (0, 0))


def test_what_does_not_fit_is_named_and_changes_nothing(saved: tuple[Path, list[Any]]) -> None:
    shards = read_shards(saved[0], "model", 4)
    found = _plain()
    before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    with pytest.raises(ValueError, match="shards of experts.even have 6 of 24 elements"):
        load_model(found, shards[:1], partial=False)
    with pytest.raises(ValueError, match=r"others.row is not in the model and in every shard"):
        load_model(
            found, [{k: v for k, v in shards[0].items() if k != "others.row"}], partial=False
        )
    names = {p: n for n, p in found.named_parameters()}
    state = torch.optim.AdamW(found.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"optimizer has \[5\] parameters, expected \[1\]"):
        load_optimizer(torch.optim.SGD([next(found.parameters())]), names, [state])
    optimizer = read_shards(saved[0], "optim", 4)
    del optimizer[2]["state"][1]
    with pytest.raises(ValueError, match="not every shard has optimizer state step of"):
        load_optimizer(torch.optim.AdamW(found.parameters()), names, optimizer)
    assert all(torch.equal(before[n], t) for n, t in found.state_dict().items())
    found.get_submodule("others").register_parameter("rows", nn.Parameter(torch.zeros(5, 4)))
    with pytest.raises(ValueError, match=r"others.rows has shape \(5, 3\), expected \(5, 4\)"):
        load_model(found, shards, partial=False)


def test_weights_that_were_not_saved_are_kept() -> None:
    found, bias = nn.Linear(2, 2), torch.ones(2)
    weight = found.weight.detach().clone()
    load_model(found, [{"bias": bias}, {"bias": bias}], partial=True)
    assert torch.equal(found.bias, bias) and torch.equal(found.weight, weight)


def test_a_copy_changes_the_dtype() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    copy_shards(target, [torch.arange(3.0)])
    assert target.tolist() == [0, 1, 2]


def _touch(folder: Path, *sets: tuple[int, int]) -> Path:
    for world, present in sets:
        for rank in range(present):
            for kind in ("model", "optim"):
                (folder / f"{kind}_world_size_{world}_rank_{rank}.pt").touch()
    return folder


def test_the_files_of_the_same_number_of_ranks_are_taken(tmp_path: Path) -> None:
    size = partial(saved_world_size, _touch(tmp_path, (2, 2), (4, 4)), ["model", "optim"])
    assert size(1, 2) == 2 and size(3, 4) == 4
    with pytest.raises(ValueError, match="has shards of 2 and 4 ranks, none of 3; keep one set"):
        size(0, 3)
    with pytest.raises(ValueError, match="no ranks, none of 3"):
        saved_world_size(tmp_path, ["extra_state"], 0, 3)


@pytest.mark.parametrize("world", [2, 4])
def test_a_missing_file_is_named(tmp_path: Path, world: int) -> None:
    _touch(tmp_path, (4, 3))
    with pytest.raises(ValueError, match="model_world_size_4_rank_3.pt is missing"):
        saved_world_size(tmp_path, ["model", "optim"], world - 1, world)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_1_rank_0.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ValueError, match="model_world_size_1_rank_0.pt is damaged"):
        read_shards(tmp_path, "model", 1)
