"""A bench on the terminal."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from .ceilings import Ceilings
from .phase import Phase
from .settings import Settings

__all__ = ["print_ceilings", "print_phase", "print_plan", "print_shares"]

_UNITS = {"device_copy": "GB/s", "host_to_device": "GB/s", "device_to_host": "GB/s"}


def print_ceilings(console: Console, settings: Settings, ceilings: Ceilings) -> None:
    """What the machine can do."""
    layers = "" if settings.layers is None else f", {settings.layers} layers"
    console.print(f"{settings.shape}{layers}, {settings.dtype} on {settings.device}")
    table = Table("ceiling", "measured", "")
    for name, value in asdict(ceilings).items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:,.4g}", _UNITS.get(name, "TFLOP/s"))
    console.print(table)


def print_phase(console: Console, phase: Phase) -> None:
    """One line."""
    parts = [f"{phase.name} at {phase.context:,}: {phase.seconds:,.3f} s"]
    if phase.tokens:
        parts.append(f"{phase.tokens / phase.seconds:,.0f} tokens/s")
    if phase.flops.total:
        parts.append(f"{phase.flops.total / phase.seconds / 1e12:,.4g} TFLOP/s")
        parts.append(f"{phase.fraction:.3f} of the roofline {phase.roofline_seconds:,.3f} s")
    if phase.predicted_bytes is not None:
        parts.append(f"peak {_gib(phase.peak_bytes)}, predicted {_gib(phase.predicted_bytes)}")
    if phase.sent_bytes is not None:
        parts.append("sent {:,} bytes a rank, by formula {:,}".format(*phase.sent_bytes))
    console.print(", ".join(parts), soft_wrap=True)


def print_shares(console: Console, name: str, shares: dict[str, float]) -> None:
    """Where the time of kernels goes."""
    parts = ", ".join(f"{group} {share:.1%}" for group, share in shares.items())
    console.print(f"{name}, kernels: {parts}", soft_wrap=True)


def print_plan(
    console: Console,
    settings: Settings,
    plans: dict[int, dict[str, int]],
    longest: dict[str, int | None],
) -> None:
    """Predicted bytes by length, and the longest prompts."""
    table = Table(f"{settings.shape}, predicted", *(f"{context:,}" for context in plans))
    for name in next(iter(plans.values())):
        table.add_row(name.replace("_", " "), *(_gib(plan[name]) for plan in plans.values()))
    console.print(table)
    for phase, tokens in longest.items():
        count = "any number of" if tokens is None else f"{tokens:,}"
        console.print(f"{phase}: {count} tokens fit in {settings.budget_gb:g} GiB of the device")


def _gib(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 2**30:,.3f} GiB"
