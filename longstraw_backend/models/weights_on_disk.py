"""Safetensors checkpoints read a weight at a time, whatever layout their experts have.

Experts of a layer are on disk either as one matrix an expert or stacked, and transformers writes
the former whatever it loaded:

    mlp.experts.7.gate_proj.weight, .up_proj.weight [I, H]  |  mlp.experts.gate_up_proj [E, 2 I, H]
    mlp.experts.7.down_proj.weight [H, I]                   |  mlp.experts.down_proj [E, H, I]
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["INDEX", "WeightsOnDisk", "sources_of"]

INDEX = "model.safetensors.index.json"
_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class WeightsOnDisk:
    """The weights of a checkpoint folder; files are opened once and mapped, not read.

    Attributes:
        files: the file of each weight, by name; empty where there are no safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.files = _files_by_name(folder)

    def shape(self, name: str) -> list[int]:
        """Of one weight."""
        shape: list[int] = self._file(name).get_slice(name).get_shape()
        return shape

    def read(self, name: str) -> Tensor:
        """One weight."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def compose(self, name: str, sources: tuple[str, ...]) -> Tensor:
        """A weight of either layout out of its :func:`sources_of`; a copy."""
        if sources == (name,):
            return self.read(name)
        if single := _SINGLE.fullmatch(name):
            return self._one_expert(sources[0], int(single[2]), single[3])
        parts = [self.read(source) for source in sources]
        if name.endswith(".gate_up_proj"):
            parts = [torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return torch.stack(parts)

    def _one_expert(self, stacked: str, expert: int, part: str) -> Tensor:
        both = self._file(stacked).get_slice(stacked)[expert]
        if part == "down":
            return both  # type: ignore[no-any-return]
        gate, up = both.chunk(2)
        result: Tensor = (gate if part == "gate" else up).clone()
        return result

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file]


def sources_of(name: str, available: Collection[str]) -> tuple[str, ...]:
    """Which of the available weights hold a weight, in the order that ``compose`` wants.

    Returns the name itself where it is available, and where nothing else holds it either.
    """
    if name in available:
        return (name,)
    if single := _SINGLE.fullmatch(name):
        kind = "down" if single[3] == "down" else "gate_up"
        stacked = f"{single[1]}.{kind}_proj"
        return (stacked,) if stacked in available else (name,)
    if stacked_match := _STACKED.fullmatch(name):
        experts, kind = stacked_match.groups()
        parts = ("gate", "up") if kind == "gate_up" else ("down",)
        count = 0
        while f"{experts}.{count}.{parts[0]}_proj.weight" in available:
            count += 1
        found = tuple(f"{experts}.{e}.{p}_proj.weight" for e in range(count) for p in parts)
        return found or (name,)
    return (name,)


def _files_by_name(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        weights: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return weights
    if not (folder / "model.safetensors").exists():
        return {}
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        return dict.fromkeys(source.keys(), "model.safetensors")
