"""Time and peak of a piece of work, and which kernels its time goes to."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType

from longstraw_backend.allocations import cpu_peak_bytes, muted
from longstraw_backend.walk.meter import wait_for

from .together import largest, wait_for_all

__all__ = ["GROUPS", "group_of", "kernel_shares", "timed", "transient_peak"]

_PATTERNS = {
    "communication": r"nccl|c10d|gloo|all_?gather|reduce_?scatter|all_?to_?all|all_?reduce|barrier",
    "attention": r"attention|sdpa|flash|fmha|mla|topk|select",
    "delta rule": r"delta|gdn|kkt|chunk_|recompute_w_u|solve_tri|triangular|conv|main_kernel",
    "copies": r"memcpy|memset|copy|cat(array|$)|clone|gather|index|scatter|contiguous",
    "matmul": r"gemm|nvjet|matmul|_mm|::(add|b|baddb)?mm|gemv|splitk|cutlass|linear",
    "elementwise": r"elementwise|reduce|norm|softmax|silu|sigmoid|logsumexp|::(add|sub|mul|div|exp|"
    r"pow|neg|mean|sum|rsqrt|where|relu|softplus|logaddexp|masked_fill|cumsum|fill|zero)_?$",
}
GROUPS = (*_PATTERNS, "other")
"""Of kernels, by their names; the first whose pattern is found has it."""


def group_of(name: str) -> str:
    """The group of a kernel or, on a CPU, of a torch operation."""
    low = name.lower()
    return next((g for g, pattern in _PATTERNS.items() if re.search(pattern, low)), "other")


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """What ``work`` returns, its seconds on the slowest rank, and the allocator's peak in bytes on
    CUDA, the highest of all ranks."""
    cuda = device.type == "cuda"
    wait_for(device)
    wait_for_all()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    result = work()
    wait_for(device)
    wait_for_all()
    seconds = time.perf_counter() - began
    peak = largest(torch.cuda.max_memory_allocated(device), device) if cuda else None
    return result, seconds, peak


def transient_peak(work: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes above what is held, in a run of its own; None on CUDA, where a timed run tells."""
    return None if device.type == "cuda" else cpu_peak_bytes(work)


def kernel_shares(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Shares of the time of kernels, 0 to 1, by group, in a run of its own under torch's profiler.

    On a CPU operations are counted, so the delta rule's own products are matrix products there.
    """
    cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(
        activities=[*kinds, torch.profiler.ProfilerActivity.CUDA] if cuda else kinds
    )
    with muted():
        profile.start()
    work()
    wait_for(device)
    with muted():
        profile.stop()
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        on_device = event.device_type != DeviceType.CPU
        if cuda == on_device:
            micros = event.self_device_time_total if cuda else event.self_cpu_time_total
            spent[group_of(event.key)] += micros
    total = sum(spent.values()) or 1.0
    return {group: spent[group] / total for group in GROUPS}
