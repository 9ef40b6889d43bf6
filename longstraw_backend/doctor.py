"""``longstraw doctor``: what is installed, what works on this machine, what is missing for what.

Nothing is imported at the top that may be missing: the doctor is for broken installations. What
concerns a framework is examined in a process of its own, since importing one may fail in any way.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from longstraw_backend.kernels.segment_attention import Impl
    from longstraw_backend.requirements import Package

__all__ = ["Finding", "add_parser", "diagnose", "run"]

State = Literal["ok", "absent", "warning", "failed"]
_FRAMEWORK_SECONDS = 300


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        state: ``absent`` is an optional part that is missing; only ``failed`` keeps one from
            training.
        found: what is there, in a few words.
        wanted: versions that fit.
        remedy: what it is needed for and how to get it; empty if nothing is to be done.
        detail: a traceback or a tool's output.
    """

    section: str
    name: str
    state: State
    found: str
    wanted: str = ""
    remedy: str = ""
    detail: str = ""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``doctor`` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check an installation",
        description="Check what is installed and what works here. Exit code 0 if what is needed "
        "to train on this machine's device is present, 1 otherwise.",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the findings to FILE too")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if nothing that training needs has failed."""
    for name in ("rich", "packaging"):
        if util.find_spec(name) is None:
            print(f'{name} is missing; run: pip install "longstraw-backend"', file=sys.stderr)
            return 1
    findings = diagnose()
    ok = not any(finding.state == "failed" for finding in findings)
    if args.json is not None:
        report = {"ok": ok, "findings": [asdict(finding) for finding in findings]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    _print(findings, ok)
    return 0 if ok else 1


def diagnose() -> list[Finding]:
    """All findings, section by section."""
    device, device_findings = _device()
    return [
        *_packages(),
        *device_findings,
        *(_attention(device) if device is not None else ()),
        *_verl(device),
    ]


def _packages() -> Iterator[Finding]:
    from longstraw_backend.requirements import PACKAGES, Package, extra_names, python_range

    version, wanted = python_range()
    fits = wanted.contains(version, prereleases=True)
    remedy = "" if fits else "run everything with a Python in that range; verl bounds it above"
    yield Finding("packages", "python", "ok" if fits else "failed", version, str(wanted), remedy)
    for package in PACKAGES:
        yield _package(package)
    listed = {package.name for package in PACKAGES}
    for name in extra_names("verl"):
        if name not in listed and not _has_distribution(name):
            # Metadata does not tell what such a package's module is called; it is not needed here.
            yield _missing(Package(name, name, "verl's trainer imports it", "training", "verl"), "")


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _package(package: Package) -> Finding:
    from longstraw_backend.requirements import installed_version, wanted_range

    version, wanted = installed_version(package), wanted_range(package.name)
    if version is None:
        return _missing(package, str(wanted))
    if version == "unknown" or wanted.contains(version, prereleases=True):
        return Finding("packages", package.name, "ok", version, str(wanted))
    state: State = "warning" if package.needed == "optional" else "failed"
    remedy = f'needed for {package.purpose}: pip install "{package.name}{wanted}"'
    return Finding("packages", package.name, state, version, str(wanted), remedy)


def _missing(package: Package, wanted: str) -> Finding:
    state: State = "absent" if package.needed == "optional" else "failed"
    remedy = f"needed for {package.purpose}: {package.remedy}"
    return Finding("packages", package.name, state, "not installed", wanted, remedy)


def _device() -> tuple[str | None, list[Finding]]:
    """The device to train on, or None without a usable torch."""
    if util.find_spec("torch") is None:
        return None, []
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = 'reinstall torch: pip install --force-reinstall "torch>=2.7"'
        return None, [Finding("device", "torch", "failed", _line(error), remedy=remedy)]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, capability {major}.{minor}"
        found = f"{torch.cuda.device_count()} x {name}, CUDA {torch.version.cuda}"
        return "cuda", [Finding("device", "cuda", "ok", found)]
    findings = [Finding("device", "cpu", "ok", "torch finds no CUDA device")]
    if shutil.which("nvidia-smi"):
        why = "is a CPU build" if torch.version.cuda is None else "does not get along with it"
        remedy = f"torch {torch.__version__} {why}: install a torch that fits the driver"
        findings.append(Finding("device", "cuda", "warning", "nvidia-smi is here", "", remedy))
    return "cpu", findings


def _attention(device: str) -> Iterator[Finding]:
    import torch

    from longstraw_backend.kernels.segment_attention import IMPLS, choose_impl

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    chosen: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        chosen.setdefault(choose_impl(torch.device(device), dtype), []).append(name)
    for impl in IMPLS:
        runs_on = {"cpu": "cpu", "flash": "cuda", "cudnn": "cuda"}.get(impl, device)
        if runs_on != device:
            yield Finding("attention", impl, "absent", f"runs on {runs_on} alone")
            continue
        problem = _try_attention(impl, device)  # type: ignore[arg-type]
        used = f", chosen for {' and '.join(chosen[impl])}" if impl in chosen else ""
        if not problem:
            yield Finding("attention", impl, "ok", f"works on {device}{used}")
            continue
        state: State = "failed" if used else "warning"
        remedy = "attention over resident pages: use a torch built for this device and its driver"
        yield Finding("attention", impl, state, problem + used, remedy=remedy if used else "")


def _try_attention(impl: Impl, device: str) -> str:
    """Run a small case forward and backward; what went wrong, or an empty string."""
    import torch

    from longstraw_backend.kernels.segment_attention import Page, segment_attention

    dtype = torch.bfloat16 if impl in ("flash", "cudnn") else torch.float32
    generator = torch.Generator().manual_seed(0)
    results = []
    q, k, page_k, page_v = (
        torch.randn(1, heads, 8, 64, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 2)
    )
    try:
        for kernel in (impl, "reference"):
            leaf = q.clone().requires_grad_()
            pages = [Page(page_k, page_v)]
            out = segment_attention(leaf, k, k, pages, scale=0.125, impl=kernel)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    except (RuntimeError, AttributeError, ValueError) as error:  # AttributeError: no such kernel
        return _line(error)
    worst = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    return "" if worst <= 0.05 else f"differs from the reference by {worst:.2g}"


def _verl(device: str | None) -> Iterator[Finding]:
    """What ``workers/verl/doctor.py`` finds, in a process of its own."""
    if device is None or util.find_spec("verl") is None:
        return
    environment = dict(os.environ)
    if device == "cpu" and not environment.get("VERL_PLATFORM"):
        remedy = "verl has no CPU platform of its own: export VERL_PLATFORM=cpu before a run"
        yield Finding("verl", "VERL_PLATFORM", "warning", "not set", "cpu", remedy)
        environment["VERL_PLATFORM"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "findings.json"
        problem = _run_quietly(_verl_command(report), environment)
        if report.exists():
            yield from (Finding("verl", **finding) for finding in json.loads(report.read_text()))
        if problem:
            remedy = "needed for training with verl: importing it must not end the process"
            yield Finding("verl", "import", "failed", "it failed", "", remedy, problem)


def _verl_command(report: Path) -> list[str]:
    return [sys.executable, "-m", "longstraw_backend.workers.verl.doctor", str(report)]


def _run_quietly(command: list[str], environment: dict[str, str]) -> str:
    """Run a command; the end of its output if it failed."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_FRAMEWORK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)}: no answer within {_FRAMEWORK_SECONDS} s"
    return (done.stdout + done.stderr)[-8000:] if done.returncode else ""


def _line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def _print(findings: list[Finding], ok: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "absent": "dim", "warning": "yellow", "failed": "bold red"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("", "", "found", "wanted"):
        table.add_column(header, overflow="fold")
    for place, finding in enumerate(findings):
        if place == 0 or findings[place - 1].section != finding.section:
            table.add_row("", Text(f"\n{finding.section}", "bold"))
        state = Text(finding.state, style[finding.state])
        table.add_row(state, Text(finding.name), Text(finding.found), Text(finding.wanted))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    for finding in findings:
        if finding.remedy:
            name = Text(f"{finding.name}: ", style[finding.state])
            console.print(name + Text(finding.remedy), soft_wrap=True)
    for finding in findings:
        if finding.detail:
            text = Text(f"\n{finding.name}:\n", "bold") + Text(finding.detail)
            console.print(text, soft_wrap=True)
    verdict = "ready to train" if ok else "not ready to train: see what failed above"
    console.print(Text(f"\n{verdict}", "bold green" if ok else "bold red"))
