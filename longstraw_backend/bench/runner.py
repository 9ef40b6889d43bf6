"""Run one bench: ceilings first, then what was asked for; the result is plain JSON."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from longstraw_backend import __version__
from longstraw_backend.compare.ranks import on_ranks
from longstraw_backend.models.sizes import ModelSizes
from longstraw_backend.parallel.layout import expert_ranks
from longstraw_backend.state import Segment

from .capture import capture, capture_phase, chunk_phase, last_chunk
from .ceilings import measure_ceilings
from .folder import Progress
from .phase import Phase
from .planner import largest_context, plan_of
from .replay import one_response, random_state, replay_phases
from .report import print_ceilings, print_phase, print_plan, print_shares
from .settings import Settings
from .shapes import config_of
from .step import step_phases
from .subject import Subject, make_subject
from .together import speaks
from .watched import kernel_shares

__all__ = ["bench", "described", "planned"]


def bench(settings: Settings, console: Console | None = None) -> dict[str, Any] | None:
    """Run and print; None if a capture ran out of ``seconds`` and has saved its state.

    Raises:
        ValueError: an option does not fit; the text names it.
    """
    config = config_of(settings.shape, settings.layers, settings.vocab)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no CUDA device; use --device cpu")
    if settings.cp == 1:
        return _bench(settings, console)
    try:
        settings = replace(settings, ep=expert_ranks(config, settings.cp, settings.ep))
    except ValueError as error:
        raise ValueError(str(error).replace("expert_parallel_size", "--ep")) from error
    return on_ranks(_bench, settings.cp, settings.device, settings)


def _bench(settings: Settings, console: Console | None = None) -> dict[str, Any] | None:
    """On every rank, of which the first prints and writes."""
    console = console or Console(quiet=not speaks())
    if not speaks():
        settings = replace(settings, folder=None)
    progress, device = Progress.begin(settings), torch.device(settings.device)
    config = config_of(settings.shape, settings.layers, settings.vocab)
    sizes = ModelSizes.of(config)
    dtype = getattr(torch, str(settings.dtype))
    ceilings = measure_ceilings(
        config, device, dtype, chunk=settings.chunk, page_tokens=settings.page_tokens
    )
    print_ceilings(console, settings, ceilings)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run = _Run(make_subject(settings, config, sizes, ceilings), progress, console)
    if not run.all():
        return None
    return described(settings) | {
        "ceilings": asdict(ceilings),
        "chunks": [asdict(c) for c in progress.chunks],
        "phases": run.phases,
        "kernels": run.shares,
        "state": run.state,
    }


def planned(settings: Settings, console: Console | None = None) -> dict[str, Any]:
    """Predicted bytes at each length, and the longest prompt that fits; runs nothing."""
    config = config_of(settings.shape, settings.layers, settings.vocab)
    sizes = ModelSizes.of(config)
    plans = {c: plan_of(config, sizes, settings, c).as_json() for c in settings.context}
    phases = "capture", "replay", "step"
    longest = {phase: largest_context(config, sizes, settings, phase) for phase in phases}
    print_plan(console or Console(), settings, plans, longest)
    return described(settings) | {
        "plans": [{"context": c} | plan for c, plan in plans.items()],
        "largest_context": longest,
    }


class _Run:
    """What a run has found so far."""

    def __init__(self, subject: Subject, progress: Progress, console: Console) -> None:
        self.subject, self.progress, self.console = subject, progress, console
        self.phases: list[dict[str, Any]] = []
        self.shares: dict[str, dict[str, float]] = {}
        self.state: dict[str, int] = {}

    def all(self) -> bool:
        """Everything that the verb has; False if the capture was stopped."""
        settings, subject = self.subject.settings, self.subject
        prompt = subject.tokens(settings.length + 1)
        if settings.random_state:
            segment: Segment | None = random_state(subject, settings.length)
        else:
            segment = capture(subject, prompt[:-1], self.progress, self._rung)
        if segment is None:
            return False
        self.phases = list(self.progress.rungs)
        self.state = {"bytes": segment.nbytes, "host_bytes": segment.host_nbytes}
        if settings.random_state and settings.verb == "capture":
            self._add([chunk_phase(subject, segment)])
        if settings.profile:
            self._share("capture", last_chunk(subject, segment))
        if settings.verb == "replay":
            self._add(replay_phases(subject, segment, settings.group))
            if settings.profile:
                self._share("replay", one_response(subject, segment, subject.response(0)))
        elif settings.verb == "step":
            self._add(step_phases(subject, prompt, segment))
        return True

    def _rung(self, segment: Segment) -> None:
        """The capture so far, and on a ladder that asks for it a replay over it."""
        settings, found = (
            self.subject.settings,
            [capture_phase(self.subject, self.progress, segment)],
        )
        if settings.verb == "ladder" and settings.replay:
            found += replay_phases(self.subject, segment, settings.group)
            self.subject.model.module.zero_grad(set_to_none=True)
            segment.drop_cotangents()
        with tqdm.external_write_mode():
            for phase in found:
                print_phase(self.console, phase)
        self.progress.rungs += [phase.as_json() for phase in found]

    def _add(self, phases: list[Phase]) -> None:
        for phase in phases:
            print_phase(self.console, phase)
        self.phases += [phase.as_json() for phase in phases]

    def _share(self, name: str, work: Any) -> None:
        self.shares[name] = kernel_shares(work, self.subject.model.device)
        print_shares(self.console, name, self.shares[name])


def described(settings: Settings) -> dict[str, Any]:
    """What every result says of itself."""
    config = config_of(settings.shape, settings.layers, settings.vocab)
    return {
        "settings": settings.as_json(),
        "parameters": ModelSizes.of(config).parameters,
        "hardware": _hardware(settings),
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _hardware(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    found |= {"cpu_count": os.cpu_count(), "threads": torch.get_num_threads()}
    if settings.device == "cuda" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_bytes": gpu.total_memory}
    return found


def _versions() -> dict[str, str | None]:
    names = "torch", "transformers", "peft", "triton", "fla-core", "flash-qla"
    found: dict[str, str | None] = {"longstraw_backend": __version__}
    found |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
