"""The command line of ``longstraw bench``. Imports torch only when it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from longstraw_backend.choices import Gradient

from .detach import STOPPED, start
from .settings import Device, Dtype, Settings, Verb, check_folder, offload_kinds, rungs_of

__all__ = ["add_parser", "run"]

_DEFAULTS = Settings("capture", "qwen3.5-0.8b")
_VERBS = {
    "capture": "capture a prompt, chunk by chunk",
    "replay": "capture, then score and replay responses one after the other",
    "step": "a whole step: capture, score, replay, optimizer",
    "ladder": "capture a prompt and report at each of several lengths, which --plot draws",
    "plan": "predict bytes and the longest prompt that fits; runs nothing",
}
_DESCRIPTION = """\
Time a model of a published shape with random weights against ceilings that are measured first:
seconds, tokens/s, TFLOP/s, fraction of the roofline (the seconds that the same operations take at
the ceilings), peak bytes predicted and measured, and shares of kernels.

Exit code 0: done. 2: bad arguments. 3: stopped by --seconds with the state saved;
go on with --resume.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command ``bench``."""
    how: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "time capture and replay of models of published shapes"
    parser = subparsers.add_parser("bench", help=text, description=_DESCRIPTION, **how)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in get_args(Verb):
        options = verbs.add_parser(verb, help=_VERBS[verb], description=_DESCRIPTION, **how)
        _add_model(options)
        _add_counts(options)
        _add_choices(options)
        _add_run(options)
    plots = verbs.add_parser("plot", help="draw results that --json wrote")
    plots.add_argument("files", metavar="FILE", type=Path, nargs="+")
    plots.add_argument("--plot", metavar="PICTURE", type=Path, required=True)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        default=_DEFAULTS.shape,
        help="qwen3.5-0.8b (default), qwen3.5-4b, qwen3.5-9b, qwen3.6-27b, qwen3.6-35b-a3b, "
        "qwen3-8b, glm-5.2, tiny-FAMILY, or the folder of a checkpoint (its config.json is read)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers only")
    parser.add_argument("--vocab", type=int, metavar="N", help="another size of the vocabulary")
    parser.add_argument(
        "--context",
        metavar="N",
        default=",".join(map(str, _DEFAULTS.context)),
        help="prompt tokens, 64K and 2M too; a list for ladder and plan (131072)",
    )


def _add_counts(parser: argparse.ArgumentParser) -> None:
    counts = {
        "response": "tokens of a response",
        "group": "responses",
        "chunk": "prompt tokens of a capture call",
        "head_chunk": "response tokens whose logits exist at one time",
        "page_tokens": "tokens of a key/value buffer",
        "lora": "rank of adapters; 0 trains all parameters",
        "cp": "ranks that share the prompt: started here, or by torchrun",
    }
    for name, text in counts.items():
        default = getattr(_DEFAULTS, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=int, metavar="N", default=default, help=f"{text} ({default})"
        )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ep", type=int, metavar="N", help="ranks that share experts; as many of --cp as can"
    )
    parser.add_argument("--gradient", choices=get_args(Gradient), default=_DEFAULTS.gradient)
    parser.add_argument(
        "--offload",
        metavar="KINDS",
        default="none",
        help="state in pinned CPU memory: none (default), all, or a list of attention, latent, "
        "recurrent",
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), help="bfloat16 on cuda, else float32")
    parser.add_argument("--device", choices=get_args(Device), default=_DEFAULTS.device)
    flags = {
        "no-checkpointing": "keep activations instead of recomputing each layer",
        "no-profile": "leave out the shares of kernels",
        "random-state": "random values in place of a captured state; capture then times one chunk",
        "replay": "ladder: also score and replay at each length",
        "plan": "only predict, as the verb plan does",
    }
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument(
        "--budget-gb",
        type=float,
        default=_DEFAULTS.budget_gb,
        metavar="GIB",
        help=f"device memory that a plan fills ({_DEFAULTS.budget_gb:g})",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")
    parser.add_argument("--plot", metavar="PICTURE", type=Path, help="also draw them")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folder", metavar="DIR", type=Path, help="keep progress and state in DIR")
    where.add_argument(
        "--detach",
        metavar="DIR",
        type=Path,
        help="the same in the background, with a log and the result",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the state in DIR")
    parser.add_argument(
        "--save-every",
        type=float,
        metavar="MINUTES",
        default=_DEFAULTS.save_every,
        help=f"between saves of the captured state; 0 saves none ({_DEFAULTS.save_every:g})",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="save and stop a capture after so many"
    )


def run(args: argparse.Namespace) -> int:
    """Bench and report; returns the exit code.

    Raises:
        ValueError: an argument is bad; the text names it.
    """
    check_folder("plot", args.plot)
    if args.verb == "plot":
        from .plot import plot_files

        plot_files(args.files, args.plot)
        return 0
    check_folder("json", args.json)
    settings = _settings(args)
    if args.plot is not None and (settings.verb == "plan" or args.detach is not None):
        raise ValueError(
            "--plot: a plan or a run in the background draws nothing; draw its result with "
            "`longstraw bench plot` or leave it out"
        )
    if args.detach is not None:
        _check(settings)
        print(f"process {start(settings)}, log {args.detach / 'log.txt'}")
        return 0
    from longstraw_backend.compare.ranks import is_first

    from .runner import bench, planned

    result = planned(settings) if settings.verb == "plan" else bench(settings)
    if not is_first():
        return 0
    if result is None:
        return STOPPED
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.plot is not None:
        from .plot import plot

        plot([result], args.plot)
    return 0


def _check(settings: Settings) -> None:
    """Raise here what a background run would write to its log."""
    from .folder import Progress
    from .shapes import config_of

    config_of(settings.shape, settings.layers, settings.vocab)
    Progress.begin(settings)


def _settings(args: argparse.Namespace) -> Settings:
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    if args.plan:
        given["verb"] = "plan"
    return Settings(
        **given
        | {
            "context": rungs_of(args.context),
            "offload": offload_kinds(args.offload),
            "checkpointing": not args.no_checkpointing,
            "profile": not args.no_profile,
            "folder": args.folder or args.detach,
        }
    )
