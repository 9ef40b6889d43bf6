"""Settings the engine would compute wrongly are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("model", "engine", "name"),
    [
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size"),
        ({}, {"pad_to_length": True}, "pad_to_length"),
        ({"enable_activation_offload": True}, {}, "enable_activation_offload"),
        ({"use_fused_kernels": True}, {}, "use_fused_kernels"),
    ],
)
def test_engine_refuses_a_setting(model: Any, engine: Any, name: str) -> None:
    from longstraw_backend.workers.verl.engine import LongStrawEngine

    with pytest.raises(ValueError, match=name):
        LongStrawEngine(SimpleNamespace(**model), SimpleNamespace(**engine), None, None)


def test_engine_refuses_to_compute_in_float16() -> None:
    from longstraw_backend.workers.verl.engine import LongStrawEngine

    engine = SimpleNamespace(mixed_precision={"param_dtype": "fp16"})
    with pytest.raises(ValueError, match="param_dtype: .* does not scale losses"):
        LongStrawEngine(SimpleNamespace(), engine, None, None)


def _batch(**settings: Any) -> Any:
    from longstraw_backend.workers.verl.standalone import PPORow, ppo_batch

    zeros = torch.zeros(2)
    return ppo_batch([PPORow(torch.arange(3), torch.arange(2), zeros, zeros, zeros)], **settings)


@pytest.mark.parametrize("name", ["distillation_only", "enable_routing_replay"])
def test_batch_refuses_a_setting(name: str) -> None:
    from longstraw_backend.workers.verl.batch import check_settings

    with pytest.raises(ValueError, match=name):
        check_settings(_batch(**{name: True}))


def test_batch_refuses_images() -> None:
    from verl.utils import tensordict_utils as tu

    from longstraw_backend.workers.verl.batch import check_settings

    batch = _batch()
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{"pixel_values": torch.zeros(1)}])
    with pytest.raises(ValueError, match="multi_modal_inputs: row 0"):
        check_settings(batch)
    check_settings(_batch())


def test_batch_without_prompts_is_an_error() -> None:
    from longstraw_backend.workers.verl.batch import check_settings

    with pytest.raises(ValueError, match="'prompts' is missing"):
        check_settings(_batch().exclude("prompts"))
