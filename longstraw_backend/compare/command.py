"""The command line of ``longstraw compare``. Imports torch only when it runs."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from longstraw_backend.config import Gradient

from .settings import Against, Device, Dtype, Settings

__all__ = ["add_parser", "run"]

_DEFAULTS = Settings()
_DESCRIPTION = """\
Run one batch of groups through capture, score and replay, and through ordinary training of the same
model, and report how far they are apart, how long each took and how much memory each needed.

Exit code 0: within the bars (float64 1e-9, float32 1e-5 for log-probs and for the gradient;
1e-7 for the float64 gradient of gated-delta-net families, whose stock modules are partly float32;
bfloat16 twice the ordinary trainer's own error against float32; score and replay bitwise equal).
With more than one rank (--cp, --dp) the other side is our own run on one rank, and parameters after
two steps of AdamW are compared too: float64 1e-10 for them and the gradient, float32 1e-6 for them.
1: not within them. 2: bad arguments.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command ``compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="compare one batch with ordinary training of the same model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--family",
        help="tiny random model: llama, qwen2, qwen3 (default), qwen3_moe, qwen3_5, qwen3_5_moe, "
        "qwen3_next, glm_moe_dsa, deepseek_v32 or deepseek_v3",
    )
    which.add_argument("--model", metavar="PATH", help="a causal LM to load")
    _add_counts(parser)
    parser.add_argument(
        "--gradient",
        choices=get_args(Gradient),
        default=_DEFAULTS.gradient,
        help="response_only: the prompt state is a constant (default); exact: the one of "
        "full-sequence training",
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), default=_DEFAULTS.dtype)
    parser.add_argument("--device", choices=get_args(Device), default=_DEFAULTS.device)
    parser.add_argument("--temperature", type=float, default=_DEFAULTS.temperature)
    parser.add_argument(
        "--against",
        choices=get_args(Against),
        help="detached: the gradient that response_only claims to be, and its default; full: "
        "through the prompt as well, the default of exact; verl-fsdp2: verl's own trainer, also "
        "through the prompt",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")


def _add_counts(parser: argparse.ArgumentParser) -> None:
    counts = {
        "prompt": "tokens of each prompt",
        "response": "tokens of the longest response of a group; the shortest has one",
        "group": "responses per prompt",
        "prompts": "number of groups",
        "chunk": "prompt tokens per capture chunk, and with exact per block in reverse",
        "response_block": "response tokens in one graph",
        "replay_tokens": "tokens of short responses that share a pass, at most; 0 runs each alone",
        "turns": "turns of a response, all but the last shared between rows",
        "seed": "of the model, the tokens and the loss weights",
        "lora": "rank of LoRA adapters with non-zero B; 0 trains all parameters",
        "cp": "ranks that share a prompt; cp x dp ranks are started, unless torchrun has done so, "
        "and compared with one, over two steps of AdamW",
        "dp": "parts that the groups are dealt to",
    }
    for name, text in counts.items():
        default = getattr(_DEFAULTS, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            default=default,
            help=f"{text} ({default})",
        )
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="ranks that share the experts of a layer (as many of cp as divide their number); "
        "with more than one, LoRA is on attention layers only",
    )


def run(args: argparse.Namespace) -> int:
    """Compare and report; returns the exit code, 0 or 1.

    Raises:
        ValueError: an argument is bad; the text names it.
    """
    values = {f.name: getattr(args, f.name) for f in fields(Settings)}
    if args.family is None and args.model is None:
        values["family"] = _DEFAULTS.family
    settings = Settings(**values)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(
            f"--json: expected a file in an existing folder, got {args.json}; create it first"
        )
    if settings.ranks > 1:
        from .split_report import compare_and_report

        return compare_and_report(settings, args.json)
    from .comparison import compare
    from .report import print_report, write_report

    comparison = compare(settings)
    print_report(comparison)
    if args.json is not None:
        write_report(comparison, args.json)
    return 0 if comparison.within_bars else 1
