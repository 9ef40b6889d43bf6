"""The CPU platform offers what verl asks of a device, and never imposes itself."""

import re
import sys
from pathlib import Path

import torch
import verl
from verl.plugin.platform.platform_manager import PlatformRegistry

from longstraw_backend.workers.verl import cpu_device
from longstraw_backend.workers.verl.platform_cpu import PlatformCPU


def test_is_registered_under_the_name_users_set():
    assert PlatformRegistry.get("cpu") is PlatformCPU


def test_is_never_detected_automatically():
    assert not PlatformCPU().is_platform_available(use_smi_check=True)


def test_device_module_has_every_name_verl_uses():
    used = set()
    for path in Path(verl.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"get_torch_device\(\)\.(\w+)", path.read_text(errors="replace")))
    assert "max_memory_allocated" in used  # the pattern still finds something
    assert sorted(name for name in used if not hasattr(cpu_device, name)) == []


def test_current_device_is_a_place_for_tensors():
    assert torch.zeros(1).to(PlatformCPU().current_device()).device.type == "cpu"


def test_peak_memory_sees_an_allocation():
    size = 256 * 2**20
    before = cpu_device.memory_allocated()
    assert 0 < before <= cpu_device.max_memory_allocated()
    block = torch.ones(size, dtype=torch.uint8)
    assert cpu_device.memory_allocated() > before + size // 2
    del block
    assert cpu_device.max_memory_allocated() > before + size // 2


def test_resetting_the_peak_forgets_it():
    if sys.platform != "linux":
        return
    block = torch.ones(256 * 2**20, dtype=torch.uint8)
    high = cpu_device.max_memory_allocated()
    del block
    cpu_device.reset_peak_memory_stats()
    assert cpu_device.max_memory_allocated() < high


def test_available_memory_is_part_of_the_total():
    available, total = cpu_device.mem_get_info()
    assert 0 < available <= total


def test_rng_state_round_trips():
    state = cpu_device.get_rng_state()
    first = torch.rand(3)
    cpu_device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_outside_a_worker_group_no_process_group_is_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert PlatformCPU().communication_backend_name() == "gloo"
    assert not torch.distributed.is_initialized()
