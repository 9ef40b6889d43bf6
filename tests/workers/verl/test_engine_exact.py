"""``gradient: exact`` in the engine equals verl's own fsdp2 engine, gradients and all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .ranks import run_ranks
from .test_engine import LOSS, _relative, _two_steps, model_path  # noqa: F401

EXACT = {"gradient": "exact", "response_block": 5, "report_gradient_gap_every": 2}


def _check(found: Any, expected: Any, of_update: float = 1e-6) -> None:
    for step in range(2):
        assert found["norms"][step] == pytest.approx(expected["norms"][step], rel=1e-5)
        assert _relative(found["grads"][step], expected["grads"][step]) <= 1e-5
    assert _relative(found["parameters"], expected["parameters"]) <= of_update


@pytest.mark.parametrize("lora", [0, 4])
def test_two_steps_equal_the_stock_engine(model_path: str, tmp_path: Path, lora: int) -> None:  # noqa: F811
    run = partial(run_ranks, _two_steps, path=model_path, lora=lora, **LOSS)
    stock = run(1, tmp_path / "stock", strategy="fsdp2")[0]
    one = run(1, tmp_path / "1", strategy="longstraw", options=EXACT)[0]
    two = run(2, tmp_path / "2", strategy="longstraw", options=EXACT)
    assert one["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    _check(one, stock)
    _check(two[0], one)
    assert all(r["norms"] == pytest.approx(one["norms"], rel=1e-5) for r in two)


def test_the_gap_between_the_gradients_is_reported(model_path: str, tmp_path: Path) -> None:  # noqa: F811
    options = {"report_gradient_gap_every": 1, "gradient": "response_only"}
    run = partial(run_ranks, _two_steps, path=model_path, strategy="longstraw", **LOSS)
    plain = run(1, tmp_path / "plain")[0]
    one = run(1, tmp_path / "1", options=options)[0]
    two = run(2, tmp_path / "2", options=options)
    assert _relative(one["grads"][1], plain["grads"][1]) == 0
    for name in ("rel_l2", "cosine"):
        values = [r["metrics"][f"longstraw/exact_vs_response_only_{name}"][0] for r in (one, *two)]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4)
        assert 0.01 < values[0] < 0.9999
