"""verl's platform layer for machines without an accelerator.

verl 0.9 has no CPU platform: without one it falls back to CUDA and fails at the first device call.
This one is opt-in by `VERL_PLATFORM=cpu` and never auto-detected, because a CPU-only Ray actor on
a GPU host would otherwise pick it. It exists to run the whole training loop on a laptop or in CI
with a tiny model; throughput is not its business.

Ray must hold pretend GPUs for verl's resource accounting (`ray_kwargs.ray_init.num_gpus`); the
overlay `+longstraw=cpu` sets that together with everything else a CPU run needs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from longstraw_backend.workers.verl import cpu_device


def _start_default_group() -> None:
    """Start the gloo group that verl is about to start, with a backend string that is valid.

    verl joins "cpu:gloo" with "<device>:<backend>", which on a CPU names the device twice and is
    rejected. It asks for the backend's name just before it looks whether a group exists already,
    and RANK is set only in processes that belong to a worker group.
    """
    if dist.is_initialized() or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    dist.init_process_group(
        "cpu:gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device called "cpu"; what only an accelerator has is a no-op."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "generic"

    @property
    def device_module(self) -> ModuleType:
        return cpu_device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> str:
        """The device's name rather than an index: verl passes it to `Tensor.to`."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        _start_default_group()
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """Ray counts only GPUs and a few other accelerators for verl; pretend ones will do."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
