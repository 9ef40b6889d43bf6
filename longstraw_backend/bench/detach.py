"""A bench in the background: ``python -m longstraw_backend.bench.detach FOLDER`` is its process.

The folder holds ``settings.json``, ``log.txt``, ``progress.json`` after each chunk, the captured
state, and at the end ``result.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .settings import Settings

__all__ = ["STOPPED", "start"]

STOPPED = 3
"""Exit code of a capture that ran out of ``--seconds``, its state saved."""


def start(settings: Settings) -> int:
    """Start the process and return its id; it goes on when this one ends."""
    folder = settings.folder
    assert folder is not None, "the command line gives a folder"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings.as_json(), indent=2) + "\n")
    command = [sys.executable, "-m", "longstraw_backend.bench.detach", str(folder)]
    with (folder / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return child.pid


def main(folder: Path) -> int:
    """Run what the folder's ``settings.json`` says; the exit code."""
    from .runner import bench

    settings = Settings.from_json(json.loads((folder / "settings.json").read_text()))
    try:
        result = bench(settings)
    except ValueError as error:
        print(f"longstraw bench: error: {error}", file=sys.stderr)
        return 2
    if result is None:
        return STOPPED
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
