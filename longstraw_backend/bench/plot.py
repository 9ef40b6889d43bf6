"""Draw results against the length of the prompt: roofline fraction, tokens a second, peak bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot", "plot_files"]

_PANELS = {
    "fraction_of_roofline": ("fraction of the roofline", 1.0),
    "tokens_per_second": ("tokens/s", 1.0),
    "peak_bytes": ("peak, GiB", 2.0**-30),
}
_PHASES = "capture", "chunk", "score", "replay"


def plot_files(files: Sequence[Path], picture: Path) -> None:
    """Of results that ``--json`` wrote.

    Raises:
        ValueError: a file is no such result.
    """
    plot([_read(file) for file in files], picture)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"FILE: expected a result of `longstraw bench`, got {file}: {error}"
        ) from None
    if "phases" not in found:
        raise ValueError(f"FILE: expected a result with phases, got {file}; a plan has none")
    return found


def plot(results: Sequence[dict[str, Any]], picture: Path) -> None:
    """A line for each shape and phase, through the lengths of all results.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot: needs matplotlib; pip install matplotlib") from error
    figure = Figure(figsize=(5 * len(_PANELS), 4), layout="constrained")
    panels = figure.subplots(1, len(_PANELS))
    for axes, (number, (text, factor)) in zip(panels, _PANELS.items(), strict=True):
        for label, phases in _lines(results).items():
            points = [(p["context"], p[number] * factor) for p in phases if p[number] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prompt tokens")
        axes.set_title(text)
    panels[0].legend()
    figure.savefig(picture)


def _lines(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Phases by shape, hardware and name, in order of length."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        where = result["hardware"].get("gpu", "CPU")
        for phase in result["phases"]:
            if phase["phase"] in _PHASES:
                label = f"{result['settings']['shape']} {phase['phase']}, {where}"
                found.setdefault(label, []).append(phase)
    return {label: sorted(p, key=lambda x: int(x["context"])) for label, p in found.items()}
