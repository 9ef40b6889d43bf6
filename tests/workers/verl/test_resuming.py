"""The engine resumes on another number of ranks with the numbers it would have gone on with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.tiny import tiny_model

from .ranks import run_ranks
from .test_engine import OPTIONS, _fill_lora_b, _full, _relative, _rows

FAMILIES = {"full": "qwen3", "lora": "qwen3", "experts": "qwen3_moe"}  # by mode


@contextmanager
def _group(rank: int, world: int, rendezvous: Path) -> Iterator[None]:
    """Another default group within the same processes, which took long to import verl."""
    method = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def _engine(root: Path, mode: str, owners: int | None = None) -> Any:
    from longstraw_backend.workers.verl.standalone import build_engine

    rank = 4 if mode == "lora" else 0
    path = str(root / FAMILIES[mode])
    owners = owners or (dist.get_world_size() if mode == "experts" else 1)
    options = OPTIONS | {"expert_parallel_size": owners}
    engine = build_engine("longstraw", path, options=options, lora_rank=rank, lr=1e-2)
    if rank:
        _fill_lora_b(engine.module)
    return engine


def _step(engine: Any) -> None:
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, ppo_batch

    rank, world, rows = dist.get_rank(), dist.get_world_size(), _rows()
    mine = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    with engine.train_mode():
        batch = ppo_batch(mine, global_rows=len(rows))
        engine.train_batch(batch, partial(ppo_loss, config=actor_config()))
        engine.lr_scheduler_step()


def _seen(engine: Any) -> dict[str, dict[str, Tensor]]:
    """What is trained, whole and by name: weights and moments."""
    seen: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
    for name, parameter in engine.module.named_parameters():
        seen["weights"][name] = _full(parameter)
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            seen["state"][f"{name} {key}"] = _full(value)
    return seen


def _schedule_and_rng(engine: Any) -> Any:
    return engine.lr_scheduler.state_dict()["last_epoch"], torch.get_rng_state()


def _saved_and_continued(root: Path, folder: Path, mode: str) -> Any:
    engine = _engine(root, mode)
    _step(engine)
    torch.manual_seed(dist.get_rank() + 5)
    engine.save_checkpoint(str(folder / mode))
    saved = _seen(engine), _schedule_and_rng(engine)
    _step(engine)
    return *saved, _seen(engine)


def _resumed(root: Path, folder: Path, mode: str, owners: int | None = None) -> Any:
    engine = _engine(root, mode, owners)
    engine.load_checkpoint(str(folder / mode))
    loaded = _seen(engine), _schedule_and_rng(engine)
    _step(engine)
    return *loaded, _seen(engine)


def _refused(root: Path, folder: Path) -> list[str]:
    """Messages for a file that is missing or damaged, and for a model of other shapes."""
    engine, messages = _engine(root, "lora"), []
    damaged, missing = folder / "damaged", folder / "missing"
    if dist.get_rank() == 0:
        for copy in (damaged, missing):
            shutil.copytree(folder / "lora", copy)
        (missing / "optim_world_size_1_rank_0.pt").unlink()
        (damaged / "extra_state_world_size_1_rank_0.pt").write_bytes(b"")
    dist.barrier()
    for wrong in (missing, damaged, folder / "full"):
        with pytest.raises(ValueError) as caught:
            engine.load_checkpoint(str(wrong))
        messages.append(str(caught.value))
    _step(engine)
    return messages


def _all(rank: int, world: int, *, root: Path) -> Any:
    """Both ranks, then each alone with some of the modes, then both again."""
    folders = {n: root / str(n) for n in (1, 2)}
    mine = list(FAMILIES)[rank::2]
    found: dict[str, Any] = {}
    found["saved by 2"] = {m: _saved_and_continued(root, folders[2], m) for m in FAMILIES}
    found["resumed by 2 of 2"] = {m: _resumed(root, folders[2], m) for m in FAMILIES}
    found["with all experts each"] = {"experts": _resumed(root, folders[2], "experts", owners=1)}
    dist.destroy_process_group()
    with _group(0, 1, root / f"alone{rank}"):
        found["resumed by 1 of 2"] = {m: _resumed(root, folders[2], m) for m in mine}
        found["saved by 1"] = {m: _saved_and_continued(root, folders[1], m) for m in mine}
    with _group(rank, world, root / "together"):
        found["resumed by 2 of 1"] = {m: _resumed(root, folders[1], m) for m in FAMILIES}
        found["refused"] = {"lora": _refused(root, folders[1])}
    # What spawned this rank ends its group.
    dist.init_process_group("gloo", init_method=f"file://{root}/end", rank=rank, world_size=world)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By what was done and mode: results of the ranks that did it."""
    root = tmp_path_factory.mktemp("resuming")
    for family in set(FAMILIES.values()):
        model: Any = tiny_model(family, initializer_range=0.1)
        model.save_pretrained(root / family)
    of_ranks = run_ranks(_all, 2, root / "out", root=root)
    return {
        done: {m: [rank[done][m] for rank in of_ranks if m in rank[done]] for m in FAMILIES}
        for done in of_ranks[0]
    }


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[kind][name], tensor)
        for kind in theirs
        for name, tensor in theirs[kind].items()
    )


@pytest.mark.parametrize("mode", FAMILIES)
@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (2, 1), (1, 2)])
def test_the_next_step_is_that_of_the_ranks_that_saved(
    found: dict[str, Any], saved: int, resumed: int, mode: str
) -> None:
    sources = found[f"saved by {saved}"][mode]
    results = found[f"resumed by {resumed} of {saved}"][mode]
    assert (len(sources), len(results)) == (saved, resumed)
    for rank, (loaded, (epoch, rng), stepped) in enumerate(results):
        at_save, (saved_epoch, saved_rng), went_on = sources[rank % saved]
        assert _equal(loaded, at_save)
        assert epoch == saved_epoch == 1 and torch.equal(rng, saved_rng)
        for kind in ("weights", "state"):
            assert _relative(stepped[kind], went_on[kind]) <= 1e-6
        assert _relative(stepped["weights"], loaded["weights"]) > 1e-4
        assert saved != resumed or _equal(stepped, went_on)


def test_experts_resume_on_ranks_that_share_them_otherwise(found: dict[str, Any]) -> None:
    sources = found["saved by 2"]["experts"]
    for (at_save, _, went_on), (loaded, _, stepped) in zip(
        sources, found["with all experts each"]["experts"], strict=True
    ):
        assert _equal(loaded, at_save)
        assert _relative(stepped["weights"], went_on["weights"]) <= 1e-6


def test_only_adapters_have_state_with_lora(found: dict[str, Any]) -> None:
    for mode in FAMILIES:
        state = found["resumed by 2 of 1"][mode][0][0]["state"]
        assert state and all(("lora_" in key) == (mode == "lora") for key in state)


def test_errors_are_raised_on_every_rank(found: dict[str, Any]) -> None:
    first, second = found["refused"]["lora"]
    assert first == second
    for message, part in zip(
        first,
        ["optim_world_size_1_rank_0.pt is missing", "is damaged", "is not in the model and in"],
        strict=True,
    ):
        assert part in message
