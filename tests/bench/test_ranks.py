"""Benches of ranks that share a prompt, over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw_backend.cli import main

SMALL = "--context 200 --chunk 64 --page-tokens 100 --response 16 --head-chunk 16".split()


def _found(tmp_path: Path, verb: str, *options: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert main(["bench", verb, *SMALL, "--cp", "2", *options, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_what_ranks_send_is_what_the_formulas_say(tmp_path: Path) -> None:
    found = _found(tmp_path, "replay", "--shape", "tiny-qwen3_5")
    phases = {p["phase"]: p for p in found["phases"]}
    assert phases.keys() == {"capture", "score", "forward", "backward", "replay"}
    for name in ("capture", "score", "forward", "backward"):
        assert phases[name]["sent_bytes"] == phases[name]["sent_bytes_by_formula"] > 0
        assert phases[name]["predicted_bytes"] is None
    assert found["kernels"]["replay"]["communication"] > 0
    assert found["settings"]["cp"] == 2 and found["settings"]["ep"] == 1


def test_ranks_step_together(tmp_path: Path) -> None:
    options = "--shape tiny-qwen3_moe --gradient exact --lora 4 --no-profile".split()
    found = _found(tmp_path, "step", *options, "--folder", str(tmp_path / "run"))
    names = ["capture", "score", "replay", "prompt_backward", "optimizer"]
    assert [p["phase"] for p in found["phases"]] == names
    assert found["settings"]["ep"] == 2
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["captured"] == 200


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["replay", "--response", "9"], "--response: expected a multiple of --cp 2, got 9"),
        (["replay", "--random-state"], "--random-state: is of one rank, got --cp 2"),
        (["plan"], "plan: is of one rank, got --cp 2"),
        (["replay", "--ep", "2"], "--ep: expected a divisor of the model's 0 experts, got 2"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--shape", "tiny-qwen3", *SMALL, "--cp", "2"]
    assert main(["bench", options[0], *small, *options[1:]]) == 2
    assert text in capsys.readouterr().err
