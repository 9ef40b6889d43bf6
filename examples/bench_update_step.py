"""One actor update of a shared-prompt group: longstraw, with either gradient, against verl's fsdp2.

    python examples/bench_update_step.py --prompt 4096 --response 64 --group 8 --json out.json

The engines are verl's real ones, built by the same code, given the same rows, each in a process of
its own; only strategy and gradient differ. Reported per engine: seconds of one update (forward,
backward, optimizer step; the capture included, nothing cached from before) as the median of
``--repeat`` after one warm-up, and the peak of memory above what the process held before it.

On a CPU the peak is that of the resident set, read from the kernel and reset before each update; on
CUDA it is the allocator's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "response_only": ("longstraw", {"gradient": "response_only"}),
    "exact": ("longstraw", {"gradient": "exact"}),
    "fsdp2": ("fsdp2", {}),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def _build_model(args: argparse.Namespace, path: str) -> None:
    from longstraw_backend.tiny import tiny_model

    heads = args.hidden // 64
    model = tiny_model(
        "qwen3",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
    )
    model.save_pretrained(path)


def _rows(args: argparse.Namespace) -> list[Any]:
    import torch

    from longstraw_backend.workers.verl.standalone import PPORow

    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, args.vocab, (args.prompt,), generator=draw)
    rows = []
    for _ in range(args.group):
        response = torch.randint(0, args.vocab, (args.response,), generator=draw)
        old = torch.full((args.response,), -8.3)
        advantages = torch.randn((), generator=draw).expand(args.response)
        rows.append(PPORow(prompt, response, old, advantages, old))
    return rows


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


class PeakMemory:
    """Bytes above the start, of the CUDA allocator or of the resident set."""

    def __enter__(self) -> PeakMemory:
        import torch

        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self._before = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        peak = torch.cuda.max_memory_allocated() if self._cuda else _resident_bytes("VmHWM")
        self.bytes = peak - self._before


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """One engine, in this process."""
    import torch
    import torch.distributed as dist
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    strategy, choice = ENGINES[args.engine]
    address = f"file://{args.model}/rendezvous-{args.engine}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    options = {"progress": False, "state_budget_gb": 0.0, **choice}
    engine = build_engine(strategy, args.model, options=options)
    rows, loss = _rows(args), partial(ppo_loss, config=actor_config())
    seconds, peaks, first_loss = [], [], None
    for _ in range(args.repeat + 1):
        batch = ppo_batch(rows)
        began = time.perf_counter()
        with PeakMemory() as peak, engine.train_mode():
            out = engine.train_batch(batch, loss)
        seconds.append(time.perf_counter() - began)
        peaks.append(peak.bytes)
        first_loss = sum(out["loss"]) if first_loss is None else first_loss
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": max(peaks[1:]),
        "loss": first_loss,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _run(engine: str, model: str) -> dict[str, Any]:
    environment = os.environ | {"VERL_ENGINE_DEVICE": "cuda"}
    import torch

    if not torch.cuda.is_available():
        environment["VERL_PLATFORM"] = "cpu"
    command = [sys.executable, *sys.argv, "--engine", engine, "--model", model]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Measure both, print the ratio."""
    args = _arguments()
    if args.engine:
        print(json.dumps(_measure(args)))
        return
    with tempfile.TemporaryDirectory() as model:
        _build_model(args, model)
        results = {engine: _run(engine, model) for engine in ENGINES}
    stock = results["fsdp2"]
    shape = {
        k: getattr(args, k) for k in ("prompt", "response", "group", "hidden", "layers", "vocab")
    }
    for engine, r in results.items():
        r |= {f"fsdp2_over_{k}": stock[k] / r[k] for k in ("seconds", "peak_bytes")}
        print(
            f"{engine:14} {r['seconds']:8.2f} s   peak {r['peak_bytes'] / 2**20:8.0f} MiB   "
            f"fsdp2 / it: time {r['fsdp2_over_seconds']:.1f}x, "
            f"memory {r['fsdp2_over_peak_bytes']:.1f}x"
        )
    if args.json:
        args.json.write_text(json.dumps({"shape": shape, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
