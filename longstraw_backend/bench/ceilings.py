"""What this machine can do at best, measured in the run that it is a yardstick for.

Matrix products, the attention kernel that a walk uses, and copies, on random data: medians after a
warm-up. On a CPU the same with tiny sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longstraw_backend.kernels.segment_attention.partial import choose_impl, get_partial
from longstraw_backend.models.families import layer_types_of
from longstraw_backend.models.sizes import head_width
from longstraw_backend.walk.meter import wait_for

from .flops import Flops

__all__ = ["Ceilings", "measure_ceilings", "roofline_seconds"]


@dataclass(frozen=True)
class Ceilings:
    """TFLOP/s and GB/s.

    Attributes:
        matmul: of square matrices.
        matmul_mlp: of a chunk of tokens with the model's up-projection.
        attention_forward: of a chunk of queries over one page; None without full attention: latent
            attention is held against matrix products.
        attention_backward: the same, five products counted.
        device_copy: bytes read and written.
        host_to_device: out of pinned memory; None where there is no device.
        device_to_host: into it.
    """

    matmul: float
    matmul_mlp: float
    attention_forward: float | None
    attention_backward: float | None
    device_copy: float
    host_to_device: float | None
    device_to_host: float | None


def roofline_seconds(flops: Flops, ceilings: Ceilings, *, backward: bool = False) -> float:
    """Seconds if every kind of work ran at its ceiling, one after the other: full attention at that
    of attention, all else at that of matrix products."""
    matmul = max(ceilings.matmul, ceilings.matmul_mlp)
    attention = ceilings.attention_backward if backward else ceilings.attention_forward
    mixing = flops.pages + flops.causal
    return ((flops.total - mixing) / matmul + mixing / (attention or matmul)) / 1e12


def measure_ceilings(
    config: Any, device: torch.device, dtype: torch.dtype, *, chunk: int, page_tokens: int
) -> Ceilings:
    """At the sizes of a model.

    Args:
        config: Hugging Face text configuration.
        chunk: new tokens.
        page_tokens: resident tokens of one kernel call.
    """
    big = device.type == "cuda"
    side = 8192 if big else 256
    chunk, page = (chunk, page_tokens) if big else (min(chunk, 64), min(page_tokens, 256))
    width = getattr(config, "intermediate_size", None) or 8 * config.moe_intermediate_size
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    attention: tuple[float, float] | None = None
    if "full_attention" in layer_types_of(config):
        attention = _attention(config, chunk, page, like)
    return Ceilings(
        _matmul(side, side, side, like),
        _matmul(chunk, config.hidden_size, width, like),
        attention[0] if attention else None,
        attention[1] if attention else None,
        _device_copy((1 << 30) if big else (1 << 22), device),
        *(_host_copies(1 << 30, device) if big else (None, None)),
    )


def _seconds(work: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    work()
    spent = []
    for _ in range(repeat):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _matmul(m: int, k: int, n: int, like: dict[str, Any]) -> float:
    a, b = torch.randn(m, k, **like), torch.randn(n, k, **like)
    return 2.0 * m * k * n / _seconds(lambda: a @ b.mT, a.device) / 1e12


def _attention(config: Any, chunk: int, page: int, like: dict[str, Any]) -> tuple[float, float]:
    """Forward and backward over one page, queries folded as a walk folds them."""
    heads, kv_heads, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        head_width(config),
    )
    q = torch.randn(1, kv_heads, heads // kv_heads * chunk, width, **like)
    k, v = (torch.randn(1, kv_heads, page, width, **like) for _ in range(2))
    partial, scale = get_partial(choose_impl(q.device, q.dtype)), width**-0.5
    out, lse = partial.forward(q, k, v, False, scale)
    dout = torch.randn_like(out)
    forward = _seconds(lambda: partial.forward(q, k, v, False, scale), q.device, 3)
    backward = _seconds(
        lambda: partial.backward(dout, q, k, v, out, lse, False, scale), q.device, 3
    )
    flops = 4.0 * chunk * page * heads * width / 1e12
    return flops / forward, 2.5 * flops / backward


def _device_copy(size: int, device: torch.device) -> float:
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _seconds(lambda: b.copy_(a), device) / 1e9


def _host_copies(size: int, device: torch.device) -> tuple[float, float]:
    """To the device and back."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    to = _seconds(lambda: there.copy_(host, non_blocking=True), device)
    back = _seconds(lambda: host.copy_(there, non_blocking=True), device)
    return size / to / 1e9, size / back / 1e9
