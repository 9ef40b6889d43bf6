"""The engine with the target families: against ordinary autograd, and two ranks against one."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstraw_backend.tiny import tiny_model

from .ranks import run_ranks
from .test_engine import LOSS, _detached_gradients, _relative, _two_steps


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_5_moe"])
def test_numbers_on_one_rank_and_on_two(family: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    tiny_model(family, initializer_range=0.1).save_pretrained(path)
    loss, expected = _detached_gradients(path, **LOSS)
    one, two = (
        run_ranks(_two_steps, n, tmp_path / str(n), path=path, strategy="longstraw", **LOSS)[0]
        for n in (1, 2)
    )
    assert one["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert {n for n in one["grads"][0] if "indexer" in n} == set()
    assert _relative(one["grads"][0], expected) <= 1e-5
    for step in range(2):
        assert _relative(two["grads"][step], one["grads"][step]) <= 1e-5
    assert _relative(two["parameters"], one["parameters"]) <= 1e-6
