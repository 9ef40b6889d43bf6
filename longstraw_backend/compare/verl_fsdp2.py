"""The ordinary side, run by verl's own stock fsdp2 engine in a process of its own.

verl chooses its platform when it is imported, once a process, so this process never imports it.
Model and batch go over as files; see ``workers/verl/compare_fsdp2.py`` for the other end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstraw_backend.groups import Group
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Objective, Outcome

from .settings import Settings
from .sides import Measured

__all__ = ["verl_training"]

_WORKER = "longstraw_backend.workers.verl.compare_fsdp2"


def verl_training(
    settings: Settings, model: nn.Module, groups: Sequence[Group], objective: Objective
) -> Measured[Outcome]:
    """Loss, log-probs and gradients of the batch from verl's engine; see ``ordinary`` for ours.

    Raises:
        ValueError: verl is not installed.
        RuntimeError: the process failed; the text ends with what it said.
    """
    if importlib.util.find_spec("verl") is None:
        raise ValueError("--against: verl-fsdp2 needs verl; pip install 'longstraw-backend[verl]'")
    with tempfile.TemporaryDirectory(prefix="longstraw-compare-") as folder:
        sent, received = Path(folder) / "sent.pt", Path(folder) / "received.pt"
        torch.save(_task(settings, model, groups, objective, Path(folder)), sent)
        _run(settings, sent, received)
        answer = torch.load(received, weights_only=True)
    rows = {i: LogProbs(*pair) for i, pair in enumerate(answer["rows"])}
    outcome = Outcome(answer["loss"], rows, answer["gradients"])
    return Measured(outcome, answer["seconds"], answer["peak_bytes"])


def _task(
    settings: Settings,
    model: Any,
    groups: Sequence[Group],
    objective: Objective,
    folder: Path,
) -> dict[str, Any]:
    """What the other process needs, of plain values and tensors."""
    pairs = {row.index: (g.prompt, row.response) for g in groups for row in g.rows}
    path, adapters = settings.model, {}
    if path is None:
        base = model.get_base_model() if settings.lora else model
        path = str(folder / "model")
        _save(base, path, lora=bool(settings.lora))
    if settings.lora:
        adapters = {n: p.detach().cpu() for n, p in model.named_parameters() if p.requires_grad}
    return {
        "model": path,
        "device": settings.device,
        "lora": settings.lora,
        "adapters": adapters,
        "rows": [pairs[i] for i in sorted(pairs)],
        "weights": list(objective.weights),
        "temperature": settings.temperature,
        "entropy_coeff": objective.entropy_coeff,
    }


def _save(base: Any, path: str, *, lora: bool) -> None:
    """Save a model without the adapters that peft put inside it."""
    weights = base.state_dict()
    if lora:
        kept = {k: v for k, v in weights.items() if ".lora_" not in k}
        weights = {k.replace(".base_layer.", "."): v for k, v in kept.items()}
    base.save_pretrained(path, state_dict=weights)


def _run(settings: Settings, sent: Path, received: Path) -> None:
    env = dict(os.environ, HF_HUB_OFFLINE="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if settings.device == "cpu":
        env |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    command = [sys.executable, "-m", _WORKER, str(sent), str(received)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"verl's fsdp2 engine ended with code {done.returncode}:\n{tail}")
