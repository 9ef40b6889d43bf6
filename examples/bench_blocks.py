"""What bounds memory: peaks of one update as prompts and responses grow, with either gradient.

    python examples/bench_blocks.py --json out.json

A Qwen3 shape on a CPU, blocks of 512 tokens. Peaks are those of tensors, weights and their
gradients left out (see ``longstraw_backend/compare``); beside them what is known to grow: the state
of the prompt, its cotangents, and state and cotangents of a response that is walked in reverse.
What is left of the peak is the graph of one block, which must not grow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from longstraw_backend.compare.inputs import batch
from longstraw_backend.compare.settings import Settings
from longstraw_backend.compare.sides import driven, measured, replay_batch, walk_of
from longstraw_backend.config import Gradient, LongStrawConfig
from longstraw_backend.tiny import tiny_model
from longstraw_backend.walk import Meter

BLOCK = 512
SIZES = [(4096, 512), (16384, 512), (4096, 2048)]
"""Tokens of prompt and of response."""


def measure(prompt: int, response: int, gradient: Gradient) -> dict[str, Any]:
    """One update of a group of two."""
    settings = Settings(prompt=prompt, response=response, group=2, prompts=1)
    model = tiny_model(
        "qwen3",
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        head_dim=64,
        vocab_size=4096,
    )
    config = LongStrawConfig(
        gradient=gradient,
        chunk_tokens=BLOCK,
        response_block=BLOCK,
        activation_checkpointing=True,
        progress=False,
    )
    walk, meter = walk_of(driven(model), config), Meter()
    groups, objective = batch(settings, 4096)

    def work() -> None:
        model.zero_grad(set_to_none=False)
        walk.store.clear()
        meter.reset()
        replay_batch(walk, groups, objective, meter)

    for p in model.parameters():  # so that gradients are not in the peak
        p.grad = torch.zeros_like(p)
    side = measured(work, torch.device("cpu"))
    kept = meter.state_bytes + meter.cotangent_bytes + meter.branch_bytes
    return {
        "prompt": prompt,
        "response": response,
        "gradient": gradient,
        "seconds": side.seconds,
        "peak_bytes": side.peak_bytes,
        "state_bytes": meter.state_bytes,
        "cotangent_bytes": meter.cotangent_bytes,
        "branch_bytes": meter.branch_bytes,
        "rest_bytes": side.peak_bytes - kept,
        "forward_tokens": meter.prompt_tokens_captured + meter.forward_tokens,
        "backward_tokens": meter.backward_tokens,
    }


def main() -> None:
    """Measure all sizes and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    found = []
    gradients: tuple[Gradient, ...] = ("response_only", "exact")
    for gradient in gradients:
        for prompt, response in SIZES:
            found.append(measure(prompt, response, gradient))
            print("  ".join(f"{k} {v}" for k, v in found[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
