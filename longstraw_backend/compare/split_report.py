"""A comparison of several ranks with one: run, as tables on the terminal, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .ranks import is_first, on_ranks
from .settings import Settings
from .split import Split, compare_split, resolved

__all__ = ["compare_and_report", "print_split"]

_NUMBERS = {
    "logprob_max_abs": "log-probs, max abs difference (nats)",
    "loss_rel": "loss, relative difference",
    "grad_rel_l2": "gradient, relative L2 of the difference",
    "norm_rel": "gradient norm of either step, relative difference",
    "parameter_rel_l2": "parameters after two steps of AdamW, relative L2",
    "update_rel_l2": "their change in these steps, relative L2",
    "float32_error.logprob_rms": "log-probs, error against float32 (rms)",
    "float32_error.grad_rel_l2": "gradient, error against float32 (relative L2)",
}


def compare_and_report(settings: Settings, file: Path | None) -> int:
    """Compare, print and write on the first rank; returns the exit code, 0 or 1.

    Raises:
        ValueError: a setting does not fit the model or the machine.
    """
    settings = resolved(settings)
    found = on_ranks(compare_split, settings.ranks, settings.device, settings)
    assert found is not None  # the first rank's
    if is_first():
        print_split(found)
        if file is not None:
            file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    return 0 if found.within_bars else 1


def print_split(split: Split, console: Console | None = None) -> None:
    """Agreement with its bars, then the state that each rank held."""
    console = console or Console()
    console.print(_headline(split.settings))
    console.print(_agreement(split))
    console.print(_state(split))
    verdict = "within the bars" if split.within_bars else "NOT within the bars"
    console.print(verdict, style="bold green" if split.within_bars else "bold red")


def _headline(settings: Settings) -> str:
    name = settings.model or f"tiny {settings.family}"
    what = f"LoRA of rank {settings.lora}" if settings.lora else "all parameters"
    return (
        f"{name}, {settings.dtype} on {settings.device}, {settings.gradient}, {what}: "
        f"{settings.ranks} ranks (dp {settings.dp} x cp {settings.cp}, ep {settings.ep}) against "
        f"one; {settings.prompts} x {settings.group} responses of 1 to {settings.response} tokens "
        f"to prompts of {settings.prompt}"
    )


def _agreement(split: Split) -> Table:
    table, numbers = Table("agreement", "value", "bar"), split.numbers
    for name, text in _NUMBERS.items():
        if name in numbers:
            bar = split.bars.get(name)
            table.add_row(text, f"{numbers[name]:.2e}", "" if bar is None else f"{bar:.1e}")
    same = "bitwise equal" if split.score_replay_bitwise else "DIFFERENT"
    table.add_row("score and replay, on every rank", same, "bitwise equal")
    return table


def _state(split: Split) -> Table:
    table = Table("prompt state", "KiB", "share")
    total = sum(split.state_bytes)
    for rank, held in enumerate(split.state_bytes):
        table.add_row(f"rank {rank}", *_sizes(held, total))
    table.add_row("all ranks", *_sizes(total, total))
    table.add_row("largest", *_sizes(max(split.state_bytes), total))
    table.add_row("one rank alone", f"{split.one_rank_state_bytes / 1024:,.1f}", "")
    return table


def _sizes(held: int, total: int) -> tuple[str, str]:
    return f"{held / 1024:,.1f}", f"{held / max(1, total):.1%}"
