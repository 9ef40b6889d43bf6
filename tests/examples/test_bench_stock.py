"""The benchmark against ordinary training runs, and finds the longest prompt that fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import bench_stock  # noqa: E402


@pytest.mark.parametrize("limit", [1, 16, 17, 100, 1000, 5000])
def test_the_longest_prompt_is_found_to_a_sixteenth(limit: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    found = bench_stock.longest(fits, 16, 1 << 20)
    assert found <= limit and found % 16 == 0
    assert limit - found <= max(16, limit // 16) and len(tried) < 20


def test_both_sides_of_a_step_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    options = "--device cpu --shape tiny-qwen3 --context 256 --chunk 64 --page-tokens 100"
    run = f"step {options} --responses 8 --group 2 --repeat 1 --json {file}"
    monkeypatch.setattr(sys, "argv", ["bench_stock.py", *run.split()])
    bench_stock.main()
    (found,) = json.loads(file.read_text())["steps"]
    assert found["response"] == 8 and found["faster"].keys() == {"response_only", "exact"}
    for side, more in (("ordinary", set()), ("exact", {"capture", "prompt_backward"})):
        assert found[side]["seconds"].keys() == {"score", "replay", "optimizer"} | more
        assert found[side]["total"] == pytest.approx(sum(found[side]["seconds"].values()))
