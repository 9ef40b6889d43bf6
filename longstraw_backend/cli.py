"""The command ``longstraw``: one module a subcommand, each with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from longstraw_backend import __version__

__all__ = ["main"]

_COMMANDS = ("bench", "compare", "doctor")


def _modules() -> dict[str, ModuleType]:
    names = {name: f"longstraw_backend.{name}" for name in _COMMANDS}
    found = {name: path for name, path in names.items() if importlib.util.find_spec(path)}
    return {name: importlib.import_module(path) for name, path in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 2 for bad arguments, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="longstraw", description="Tools of longstraw_backend.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = _modules()
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(modules[args.command].run(args))
    except ValueError as error:
        print(f"longstraw {args.command}: error: {error}", file=sys.stderr)
        return 2
