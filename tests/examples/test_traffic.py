"""The saved table of traffic is what the formulas give, for models of the published sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # scripts find each other beside themselves
import traffic  # noqa: E402


@pytest.mark.parametrize("name", traffic.SPLITS)
def test_saved_numbers_are_those_of_the_formulas(name: str) -> None:
    saved = json.loads((EXAMPLES / "results" / "traffic.json").read_text())[name]
    assert saved == json.loads(json.dumps(traffic.evaluate(traffic.SPLITS[name])))
