"""A comparison as tables on the terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .comparison import Comparison
from .settings import Settings

__all__ = ["print_report", "write_report"]

_NUMBERS = {
    "logprob_max_abs": "log-probs, max abs difference (nats)",
    "loss_rel": "loss, relative difference",
    "grad_rel_l2": "gradient, relative L2 of the difference",
    "grad_cosine": "gradient, cosine",
    "float32_error.logprob_rms": "log-probs, our error against float32 (rms)",
    "float32_error.grad_rel_l2": "gradient, our error against float32 (relative L2)",
}
_NOTE = (
    "The gradients differ by design: response_only drops the part through the prompt. Compare "
    "response_only --against detached, or exact --against full, for what must agree."
)


def write_report(comparison: Comparison, path: Path) -> None:
    """All numbers as JSON."""
    path.write_text(json.dumps(comparison.as_json(), indent=2) + "\n")


def print_report(comparison: Comparison, console: Console | None = None) -> None:
    """Agreement with its bars, then time and memory of both sides."""
    console = console or Console()
    console.print(_headline(comparison.settings))
    console.print(_agreement(comparison))
    console.print(_cost(comparison))
    console.print(_gap(comparison))
    if not comparison.settings.gradient_is_ours:
        console.print(_NOTE)
    verdict = "within the bars" if comparison.within_bars else "NOT within the bars"
    console.print(verdict, style="bold green" if comparison.within_bars else "bold red")


def _headline(settings: Settings) -> str:
    name = settings.model or f"tiny {settings.family}"
    turns = f" in {settings.turns} turns" if settings.turns > 1 else ""
    return (
        f"{name}, {settings.dtype} on {settings.device}, {settings.gradient} against "
        f"{settings.against}: {settings.prompts} x {settings.group} responses of 1 to "
        f"{settings.response} tokens{turns} to prompts of {settings.prompt}"
    )


def _agreement(comparison: Comparison) -> Table:
    table = Table("agreement", "value", "bar")
    errors = comparison.float32_error or {}
    numbers = asdict(comparison.apart)
    if "longstraw" in errors:
        ours = asdict(errors["longstraw"])
        numbers |= {f"float32_error.{name}": value for name, value in ours.items()}
    for name, text in _NUMBERS.items():
        if name in numbers:
            value = f"{numbers[name]:.9f}" if name == "grad_cosine" else f"{numbers[name]:.2e}"
            bar = comparison.bars.get(name)
            table.add_row(text, value, "" if bar is None else f"{bar:.1e}")
    same = "bitwise equal" if comparison.score_replay_bitwise else "DIFFERENT"
    table.add_row("score and replay", same, "bitwise equal")
    return table


def _gap(comparison: Comparison) -> str:
    gap = comparison.exact_vs_response_only
    return (
        "What response_only drops of the exact gradient of this batch: relative L2 "
        f"{gap['rel_l2']:.3f}, cosine {gap['cosine']:.3f}"
    )


def _cost(comparison: Comparison) -> Table:
    table = Table("one update", "longstraw", "reference")
    seconds = [comparison.seconds[side] for side in ("longstraw", "reference")]
    table.add_row("seconds", *(f"{s:.3f}" for s in seconds))
    peaks = [comparison.peak_bytes[side] for side in ("longstraw", "reference")]
    tokens = comparison.tokens
    forward = tokens["captured"] + tokens["forward"]
    table.add_row("tokens run forward", f"{forward:,}", f"{tokens['full_sequences']:,}")
    table.add_row("tokens run backward", f"{tokens['backward']:,}", f"{tokens['full_sequences']:,}")
    table.add_row("peak memory above the start (MiB)", *(f"{p / 2**20:.1f}" for p in peaks))
    return table
