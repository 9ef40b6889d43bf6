"""Every split of the work over ranks against one rank: all factorisations, two steps of AdamW each.

    python examples/check_ranks.py --json out.json
    python examples/check_ranks.py --families qwen3_moe --ranks 8 --dtype float32

All of cp and ep in {1, 2, 4} and dp in {1, 2} up to so many ranks, which are processes on this
CPU; both gradients, LoRA with non-zero B and all parameters. Some ranks have no tokens in some
blocks, and prompts of one and two tokens leave some without state. Numbers and bars are those of
``longstraw compare --cp --ep --dp``. Cases that FILE has already are kept and not run again.

Exit code 0: all within the bars; 1: not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from longstraw_backend.compare.comparison import versions
from longstraw_backend.compare.ranks import on_ranks
from longstraw_backend.compare.settings import Dtype, Settings
from longstraw_backend.compare.split import measure
from longstraw_backend.compare.two_steps import Trained, train
from longstraw_backend.config import Gradient
from longstraw_backend.groups import Group, group_rows
from longstraw_backend.oracle import Objective
from longstraw_backend.parallel import Layout
from longstraw_backend.tiny import AVAILABLE, options_of

ROWS = [(39, 9), (22, 1), (22, 14), (1, 3), (2, 1), (39, 17)]
"""(Prompt tokens, response tokens); equal lengths share the prompt."""
BLOCK = 8
LORA = 4
WORLDS = (2, 4, 8)
SIZES = (1, 2, 4)
NUMBERS = ("logprob_max_abs", "grad_rel_l2", "norm_rel", "parameter_rel_l2", "update_rel_l2")


def splits(family: str, world: int) -> Iterator[dict[str, int]]:
    """Factorisations of so many ranks; families without experts have ep 1."""
    moe = any("experts" in name for name in options_of(family))
    for cp in SIZES:
        for ep in SIZES if moe else SIZES[:1]:
            if world % cp == 0 and world // cp <= 2 and world % ep == 0:
                yield {"cp": cp, "ep": ep, "dp": world // cp}


def cases(families: Sequence[str], world: int, dtype: Dtype) -> list[Settings]:
    """All of a number of ranks; those with the same run on one rank in a row."""
    gradients: tuple[Gradient, ...] = get_args(Gradient)
    common: Any = {"dtype": dtype, "chunk": BLOCK, "response_block": BLOCK}
    return [
        Settings(family=family, gradient=gradient, lora=lora, **common, **split)
        for family in families
        for gradient in gradients
        for lora in (0, LORA)
        for split in splits(family, world)
    ]


def mixed_batch() -> tuple[list[Group], Objective]:
    """``ROWS`` as groups, and a loss with random weights."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, 311, (count,), generator=generator)

    prompts = {length: tokens(length) for length, _ in ROWS}
    total = sum(length for _, length in ROWS)
    responses = [tokens(length) for _, length in ROWS]
    weights = [torch.randn(r.numel(), generator=generator) / total for r in responses]
    groups = group_rows([prompts[length] for length, _ in ROWS], responses)
    return groups, Objective(weights, [1.0] * len(ROWS), 0.01)


def run_cases(todo: Sequence[Settings], before: list[dict[str, Any]], file: Path | None) -> Any:
    """On every rank: ``before`` and what the first rank finds, written after each case."""
    layouts: dict[Any, Layout] = {}
    alone: dict[Any, Trained] = {}
    batch, found = mixed_batch(), list(before)
    for case in todo:
        split = case.cp, case.ep or 1
        if split not in layouts:
            layouts[split] = Layout.of("cpu", *split)
        one = None
        if torch.distributed.get_rank() == 0:
            run = case.family, case.gradient, case.lora, bool(case.lora) and case.ep == 1
            one = alone.get(run) or train(case, *batch)
            alone[run] = one
        result = measure(case, one, train(case, *batch, layouts[split]))
        if result is not None:
            numbers = {name: result.numbers[name] for name in ("loss_rel", *NUMBERS)}
            found.append(
                case_of(case)
                | numbers
                | {
                    "score_replay_bitwise": result.score_replay_bitwise,
                    "state_bytes": result.state_bytes,
                    "one_rank_state_bytes": result.one_rank_state_bytes,
                    "bars": result.bars,
                    "within_bars": result.within_bars,
                }
            )
            print(line(found[-1]), flush=True)
            if file is not None:
                write(file, found)
    return found


def case_of(settings: Settings) -> dict[str, Any]:
    """What tells a case from others."""
    names = ("family", "dtype", "gradient", "lora", "cp", "ep", "dp")
    return {name: getattr(settings, name) for name in names}


def line(case: dict[str, Any]) -> str:
    """A case in short."""
    where = " ".join(f"{n} {case[n]}" for n in ("dp", "cp", "ep", "lora"))
    values = "  ".join(f"{case[name]:.1e}" for name in NUMBERS)
    verdict = "ok" if case["within_bars"] else "NOT within the bars"
    return f"{case['family']} {case['gradient']} {where}: {values} {verdict}"


def worst(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Largest number of each family."""
    families = dict.fromkeys(case["family"] for case in found)
    return {
        family: {n: max(c[n] for c in found if c["family"] == family) for n in NUMBERS}
        for family in families
    }


def write(file: Path, found: list[dict[str, Any]]) -> None:
    """All cases, with versions, date and the largest numbers."""
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "rows": ROWS,
        "block_tokens": BLOCK,
        "within_bars": all(case["within_bars"] for case in found),
        "worst": worst(found),
        "cases": found,
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, file)


def print_worst(found: Sequence[dict[str, Any]]) -> None:
    """A row a family."""
    table = Table("family", "cases", *NUMBERS, "score = replay", "missed")
    for family, numbers in worst(found).items():
        own = [case for case in found if case["family"] == family]
        same = "bitwise" if all(c["score_replay_bitwise"] for c in own) else "DIFFERENT"
        missed = sum(not c["within_bars"] for c in own)
        values = [f"{numbers[name]:.1e}" for name in NUMBERS]
        table.add_row(family, str(len(own)), *values, same, str(missed))
    Console().print(table)


def main() -> int:
    """Run all cases and print the largest differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=AVAILABLE, default=list(AVAILABLE))
    parser.add_argument("--ranks", type=int, default=4, help="at most; 8 is the largest")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())["cases"]
    for world in (w for w in WORLDS if w <= args.ranks):
        known = [{n: case[n] for n in case_of(Settings())} for case in found]
        todo = [c for c in cases(args.families, world, args.dtype) if case_of(c) not in known]
        if todo:
            found = on_ranks(run_cases, world, "cpu", todo, found, args.json)
    print_worst(found)
    return 0 if all(case["within_bars"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
