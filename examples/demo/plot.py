"""Draws a run from verl's `file` logger: reward, time per phase and memory over the steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, float]
Curve = tuple[list[int], list[float]]

# What a panel shows -> the names it may have in the tracker; the first that occurs wins. verl
# prefixes the numbers of the training engine with `actor/`.
METRICS: dict[str, tuple[str, ...]] = {
    "training prompts": ("critic/score/mean", "critic/rewards/mean"),
    "held-out prompts": ("val-core/longstraw/find_the_note/acc/mean@1",),
    "step": ("timing_s/step",),
    "generation": ("timing_s/gen", "timing_s/generate_sequences"),
    "decode": ("actor/longstraw/decode_seconds", "longstraw/decode_seconds"),
    "capture": ("actor/longstraw/capture_seconds", "longstraw/capture_seconds"),
    "score": ("actor/longstraw/score_seconds", "longstraw/score_seconds", "timing_s/old_log_prob"),
    "replay": ("actor/longstraw/replay_seconds", "longstraw/replay_seconds"),
    "update": ("timing_s/update_actor",),
    "prompt state": ("actor/longstraw/resident_state_bytes", "longstraw/resident_state_bytes"),
    "worker process": ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb"),
}
REWARDS = ("training prompts", "held-out prompts")
TIMES = ("step", "generation", "capture", "decode", "score", "replay", "update")


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """Return (step, numbers) of every complete line; a line still being written is left out."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            record = json.loads(line)
            rows.append((int(record["step"]), record["data"]))
    return rows


def curve(rows: Sequence[tuple[int, Row]], what: str) -> Curve:
    """Return steps and values of one entry of METRICS, empty if the run has none of its names."""
    for name in METRICS[what]:
        points = [(step, float(row[name])) for step, row in rows if row.get(name) is not None]
        if points:
            return [step for step, _ in points], [value for _, value in points]
    return [], []


def draw_lines(
    axes: Any, rows: Sequence[tuple[int, Row]], names: Sequence[str], scale: float = 1.0
) -> None:
    """Draw the named curves that the run has, and a legend."""
    for name in names:
        steps, values = curve(rows, name)
        if steps:
            style = "o-" if len(steps) < 10 else "-"
            axes.plot(steps, [value * scale for value in values], style, markersize=4, label=name)
    if axes.lines:
        axes.legend(fontsize=8)
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)


def draw(metrics: Path, png: Path, title: str) -> None:
    """Write the three panels as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_rows(metrics)
    figure, (reward, seconds, memory) = plt.subplots(1, 3, figsize=(15, 4))
    draw_lines(reward, rows, REWARDS)
    reward.set(title="reward", ylim=(0, 1))
    draw_lines(seconds, rows, TIMES)
    seconds.set(title="seconds per step", yscale="log")
    draw_lines(memory, rows, ("prompt state",), scale=2.0**-20)
    memory.set(title="memory", ylabel="resident prompt state, MiB", ylim=(0, None))
    process = memory.twinx()
    draw_lines(process, rows, ("worker process",))
    process.set(ylabel="peak memory of the worker process, GB", ylim=(0, None))
    for line in process.lines:
        line.set(color="tab:red", linestyle="--")
    merge_legends(memory, process)
    figure.suptitle(title)
    figure.tight_layout()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def merge_legends(left: Any, right: Any) -> None:
    """Put the curves of two axes that share a panel into one legend."""
    lines = [*left.lines, *right.lines]
    for axes in (left, right):
        if axes.get_legend():
            axes.get_legend().remove()
    if lines:
        left.legend(lines, [line.get_label() for line in lines], fontsize=8)


def main() -> None:
    """Draw a run again: `python plot.py METRICS.jsonl OUT.png`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(args.metrics, args.png, args.metrics.stem)


if __name__ == "__main__":
    main()
