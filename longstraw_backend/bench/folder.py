"""What a run keeps in its folder: which walk it is, progress after each chunk, captured state."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from longstraw_backend.state import Segment

from .settings import Settings
from .state_files import load_state, save_state, state_files

__all__ = ["Chunk", "Progress"]


@dataclass(frozen=True)
class Chunk:
    """A captured chunk: the tokens there are after it, its seconds, its peak in bytes, and the
    bytes that left this rank."""

    stop: int
    seconds: float
    peak_bytes: int | None
    sent_bytes: int = 0


@dataclass
class Progress:
    """Of a capture, in memory and, if there is a folder, in its ``progress.json``.

    Attributes:
        chunks: those whose state is captured.
        rungs: what was measured at rungs of a ladder, as JSON.
    """

    settings: Settings
    chunks: list[Chunk] = field(default_factory=list)
    rungs: list[dict[str, Any]] = field(default_factory=list)
    _saved: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, settings: Settings) -> Progress:
        """A new one, or with ``resume`` the one in the folder.

        Raises:
            ValueError: the folder holds another run, or none to resume.
        """
        progress, folder = cls(settings), settings.folder
        if folder is None:
            return progress
        folder.mkdir(parents=True, exist_ok=True)
        found = progress._read(folder)
        if found is not None:
            progress.chunks = [Chunk(**c) for c in found["chunks"]]
            progress.rungs = found["rungs"]
        return progress

    def _read(self, folder: Path) -> dict[str, Any] | None:
        file, saved = folder / "progress.json", state_files(folder)
        if not self.settings.resume:
            if saved:
                raise ValueError(
                    f"--folder: {folder} holds the state of a run; go on with --resume, or take "
                    "another folder"
                )
            return None
        if not file.is_file():
            raise ValueError(f"--resume: expected a run in {folder}, found none; leave it out")
        found: dict[str, Any] = json.loads(file.read_text())
        for name, value in self.settings.walk.items():
            if found["walk"][name] != value:
                raise ValueError(
                    f"--resume: the state in {folder} is of {name}={found['walk'][name]!r}, "
                    f"got {value!r}; take the same options or another folder"
                )
        return found

    def restore(self, segment: Segment, device: torch.device) -> None:
        """The saved state into an empty segment; chunks after it are forgotten."""
        if self.settings.folder is not None and self.settings.resume:
            load_state(segment, self.settings.folder, self.settings.chunk, device)
        self.chunks = [c for c in self.chunks if c.stop <= segment.length]
        self.rungs = [r for r in self.rungs if r["context"] <= segment.length]

    def add(self, chunk: Chunk, segment: Segment) -> None:
        """A chunk was captured; its state is saved if it is time to."""
        self.chunks.append(chunk)
        minutes = (time.monotonic() - self._saved) / 60
        if self.settings.save_every and minutes >= self.settings.save_every:
            self.save(segment)
        self.write()

    def save(self, segment: Segment) -> None:
        """Save the state, if there is a folder."""
        if self.settings.folder is not None:
            save_state(segment, self.settings.folder, self.settings.chunk)
            self._saved = time.monotonic()

    def write(self) -> None:
        """``progress.json``, if there is a folder."""
        if self.settings.folder is None:
            return
        spent = sum(c.seconds for c in self.chunks)
        done = self.chunks[-1].stop if self.chunks else 0
        values = {
            "walk": self.settings.walk,
            "captured": done,
            "tokens_per_second": done / spent if spent else None,
            "chunks": [asdict(c) for c in self.chunks],
            "rungs": self.rungs,
        }
        file = self.settings.folder / "progress.json"
        half = file.with_suffix(".half")
        half.write_text(json.dumps(values) + "\n")
        half.rename(file)
