"""verl's engine on ranks that share prompts and experts: the numbers of one rank, two steps on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longstraw_backend.tiny import tiny_model

from .ranks import run_ranks
from .test_engine import _relative, _two_steps


class Split(NamedTuple):
    """A model, what is trained of it, and over which ranks."""

    family: str
    gradient: str
    lora: int
    context: int
    expert: int | None


SPLITS = {
    2: [
        Split("qwen3", "response_only", 4, 2, None),
        Split("qwen3_moe", "exact", 0, 1, 2),
        Split("qwen3_moe", "exact", 4, 2, None),
    ],
    4: [Split("glm_moe_dsa", "exact", 0, 2, 4), Split("qwen3_5_moe", "response_only", 0, 2, 2)],
}


def _split_steps(rank: int, world: int, *, folder: str, splits: list[Split]) -> list[Any]:
    found = []
    for split in splits:
        options = {
            "chunk_tokens": 16,
            "gradient": split.gradient,
            "context_parallel_size": split.context,
            "expert_parallel_size": split.expert,
        }
        # Adam makes much of gradients that are rounding alone; a larger step would show them.
        steps = partial(_two_steps, rank // split.context, world // split.context, lr=1e-4)
        path = f"{folder}/{split.family}"
        found.append(steps(path=path, strategy="longstraw", lora=split.lora, options=options))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in {split.family for splits in SPLITS.values() for split in splits}:
        tiny_model(family, initializer_range=0.1).save_pretrained(path / family)
    return path


@pytest.mark.parametrize("world", SPLITS)
def test_two_steps_are_those_of_one_rank(folder: Path, tmp_path: Path, world: int) -> None:
    alone = [split._replace(context=1, expert=1) for split in SPLITS[world]]
    where = dict(folder=str(folder))
    (expected,) = run_ranks(_split_steps, 1, tmp_path / "one", splits=alone, **where)
    ranks = run_ranks(_split_steps, world, tmp_path / "all", splits=SPLITS[world], **where)
    for split, one, *split_over in zip(SPLITS[world], expected, *ranks, strict=True):
        for found in split_over:
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-5), split
            for ours, theirs in zip(found["grads"], one["grads"], strict=True):
                assert _relative(ours, theirs) <= 1e-5, split
            assert _relative(found["parameters"], one["parameters"]) <= 1e-6, split
            assert found["exported"] == one["exported"], split
        rows = [row for found in split_over[:: split.context] for row in found["log_probs"]]
        for ours, theirs in zip(rows, one["log_probs"], strict=True):
            assert (ours - theirs).abs().max() <= 1e-5, split
