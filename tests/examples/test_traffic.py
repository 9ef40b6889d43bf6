"""The saved table of traffic is what the formulas give, for models of the published sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # scripts find each other beside themselves
import shapes  # noqa: E402
import traffic  # noqa: E402

BILLIONS = {"Qwen3.6-27B": 27, "GLM-5.2": 744}


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_saved_numbers_are_those_of_the_formulas(name: str) -> None:
    saved = json.loads((EXAMPLES / "results" / "traffic.json").read_text())[name]
    assert saved == json.loads(json.dumps(traffic.evaluate(shapes.SHAPES[name])))


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_have_the_parameters_that_their_models_are_named_for(name: str) -> None:
    count = shapes.num_parameters(shapes.SHAPES[name].config, routed_experts=True)
    assert round(count / 1e9) == BILLIONS[name]
