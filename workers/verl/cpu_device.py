"""A device module over `torch.cpu` with the names verl expects of `torch.cuda`.

verl asks the platform for "the torch device module" and calls memory, stream and RNG functions on
it that `torch.cpu` lacks. Memory figures are those of the process, so that verl's memory metrics
stay meaningful: allocated = resident set, peak = its high-water mark, total = the machine's RAM.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch.cpu import (  # noqa: F401  (re-exported: this module stands in for torch.cuda)
    Event,
    Stream,
    StreamContext,
    current_device,
    current_stream,
    device_count,
    is_available,
    set_device,
    stream,
    synchronize,
)

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


def _proc_status_bytes(field: str) -> int | None:
    """A size from /proc/self/status, or None where there is no such file (macOS, Windows)."""
    if not _PROC_STATUS.exists():
        return None
    for line in _PROC_STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def max_memory_allocated(device: Any = None) -> int:
    """Peak resident set of this process since its start or the last reset, in bytes."""
    peak = _proc_status_bytes("VmHWM")
    if peak is not None:
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_allocated(device: Any = None) -> int:
    """Resident set of this process in bytes (its peak where the current one is not exposed)."""
    resident = _proc_status_bytes("VmRSS")
    return max_memory_allocated() if resident is None else resident


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new high-water mark; without effect where the kernel offers none."""
    if _PROC_CLEAR_REFS.exists():
        _PROC_CLEAR_REFS.write_text("5")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    return available, os.sysconf("SC_PHYS_PAGES") * page


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def get_device_name(device: Any = None) -> str:
    """The processor's name; verl looks it up in its table of peak FLOPS and finds none."""
    return platform.processor() or platform.machine() or "cpu"


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The generator's state: on a CPU there is only the global one."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Restore the global generator."""
    torch.set_rng_state(new_state)


def empty_cache() -> None:
    """Nothing is cached."""


def ipc_collect() -> None:
    """Nothing is shared by handle."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """The operating system decides."""
