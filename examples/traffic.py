"""What ranks send each other at two million tokens: formulas evaluated, nothing is run.

    python examples/traffic.py --json out.json

Bytes that leave one rank for others, bf16, with activation checkpointing, for two shapes of
``longstraw bench`` split as their overlays in ``configs/longstraw`` do; the formulas are those of
``longstraw_backend/models/block_traffic.py``, which tests hold against the counters of real runs.
Seconds are bytes over ``--bandwidth`` alone: no latency, and nothing hidden behind work. What FSDP
gathers for the forwards of the capture comes on top and is given by itself.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw_backend.bench.shapes import config_of
from longstraw_backend.models.block_traffic import Split, gathered_parameter_bytes, layer_bytes
from longstraw_backend.models.families import layer_types_of
from longstraw_backend.models.sizes import ModelSizes
from longstraw_backend.walk.update_traffic import (
    captured_token_bytes,
    replayed_token_bytes,
    update_bytes,
)

TOKENS, RESPONSE = 2_097_152, 8192
"""Tokens of the prompt that are captured, and of a response."""


@dataclass(frozen=True)
class Split2M:
    """How a shape's overlay splits it.

    Attributes:
        shape: its name.
        ranks: that share a prompt.
        expert_ranks: that share a layer's experts.
        chunk: prompt tokens of a block.
    """

    shape: str
    ranks: int
    expert_ranks: int
    chunk: int


SPLITS = {
    "Qwen3.6-27B": Split2M("qwen3.6-27b", ranks=8, expert_ranks=1, chunk=32768),
    "GLM-5.2": Split2M("glm-5.2", ranks=32, expert_ranks=32, chunk=131072),
}


def evaluate(shape: Split2M) -> dict[str, Any]:
    """All numbers of a shape, in bytes that a rank sends."""
    config, cp, ep = config_of(shape.shape), shape.ranks, shape.expert_ranks
    split, chunk = Split(cp, ep), shape.chunk
    replayed = replayed_token_bytes(
        config, cp, ep, gradient="exact", checkpointing=True, block=RESPONSE
    )
    phases = update_bytes(
        config,
        TOKENS + 1,
        [RESPONSE],
        split,
        chunk=chunk,
        response_block=RESPONSE,
        gradient="exact",
        checkpointing=True,
    )
    sizes = ModelSizes.of(config)
    gathered = sizes.parameters - (0 if ep == 1 else sizes.routed)
    return {
        "ranks": cp,
        "expert_ranks": ep,
        "chunk_tokens": chunk,
        "layer_token": _layers(config, chunk, split),
        "captured_token": captured_token_bytes(config, cp, ep, chunk=chunk),
        "replayed_token": replayed["response"],
        "reversed_prompt_token": replayed["prompt"],
        "capture": phases["capture"],
        "replay": phases["replay"],
        "prompt_backward": phases["prompt_backward"],
        "fsdp_gather_of_a_pass": gathered_parameter_bytes(gathered, cp),
        "fsdp_gather_of_the_capture": gathered_parameter_bytes(gathered, cp) * -(-TOKENS // chunk),
    }


def _layers(config: Any, chunk: int, split: Split) -> dict[str, dict[str, dict[str, float]]]:
    """By type of layer and purpose, per token of a layer that has both."""
    block = range(TOKENS, TOKENS + chunk)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, layer in zip(layer_types_of(config), layer_bytes(config, block, split), strict=True):
        found.setdefault(kind, {}).update(
            {
                p: {k: getattr(s, k) / chunk for k in ("forward", "backward")}
                for p, s in layer.items()
            }
        )
    return found


def show(name: str, found: dict[str, Any], bandwidth: float) -> None:
    """Print the table of a shape."""
    print(f"\n{name}: {found['ranks']} ranks, experts over {found['expert_ranks']}, ", end="")
    print(f"chunks of {found['chunk_tokens']:,} tokens; bytes that leave a rank")
    print("  per token and layer                     forward       backward")
    for kind, purposes in found["layer_token"].items():
        for purpose, sent in purposes.items():
            print(f"  {kind:18}{purpose:14}", end="")
            print(f"{sent['forward']:15,.1f}{sent['backward']:15,.1f}")
    print("  per token, all layers")
    for what in ("captured_token", "replayed_token", "reversed_prompt_token"):
        _show_line(what, found[what])
    print(f"  in all, and seconds at {bandwidth:g} GB/s")
    for what in ("capture", "replay", "prompt_backward"):
        total = sum(found[what].values())
        print(f"  {what:28}{total / 1e9:12,.1f} GB{total / 1e9 / bandwidth:10.2f} s")
    for what in ("fsdp_gather_of_a_pass", "fsdp_gather_of_the_capture"):
        print(f"  {what:28}{found[what] / 1e9:12,.1f} GB{found[what] / 1e9 / bandwidth:10.2f} s")


def _show_line(what: str, sent: dict[str, float]) -> None:
    parts = ", ".join(f"{purpose} {n:,.0f}" for purpose, n in sent.items())
    print(f"  {what:24}{sum(sent.values()):16,.0f}  ({parts})")


def main() -> None:
    """Evaluate both shapes and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bandwidth", type=float, default=200.0, help="GB/s out of a rank")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    print(f"prompt of {TOKENS:,} captured tokens, a response of {RESPONSE:,}")
    found = {name: evaluate(shape) for name, shape in SPLITS.items()}
    for name, numbers in found.items():
        show(name, numbers, args.bandwidth)
    if args.json:
        sizes = {"prompt": TOKENS, "response": RESPONSE, "bandwidth_gb_s": args.bandwidth}
        args.json.write_text(json.dumps(sizes | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
