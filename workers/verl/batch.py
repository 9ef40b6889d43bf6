"""verl's batch to our rows and back. No maths here.

verl hands an engine a TensorDict of jagged tensors, one row a response: ``prompts`` [P_i],
``responses`` [R_i], per-row and scalar settings. It wants ``log_probs`` and ``entropy`` back as
jagged tensors whose last R_i + 1 entries of a row hold the R_i values, shifted left by one; what
comes before is never read, so rows of R_i + 1 entries are enough and a prompt of millions of tokens
costs nothing on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from longstraw_backend.groups import Group, group_rows
from longstraw_backend.kernels.logprob_head import LogProbs

__all__ = [
    "LossRows",
    "check_settings",
    "groups_of",
    "jagged_outputs",
    "loss_output",
    "temperatures_of",
]

_PER_TOKEN_OF_PROMPT = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "multi_modal_inputs",
    "raw_prompt",
    "prompt",
)
_UNSUPPORTED = {
    "distillation_use_topk": "distillation losses need full logits",
    "distillation_only": "distillation losses need full logits",
    "enable_routing_replay": "router replay is not supported",
    "calculate_sum_pi_squared": "sum_pi_squared needs full logits",
}


def check_settings(data: TensorDict) -> None:
    """Raise ValueError, naming the setting, for what this engine would compute wrongly."""
    for name, reason in _UNSUPPORTED.items():
        if tu.get_non_tensor_data(data, name, default=False):
            raise ValueError(f"{name}: {reason}; switch it off or use another actor.strategy")
    for name in ("prompts", "responses", "loss_mask"):
        if name not in data:
            raise ValueError(
                f"batch: {name!r} is missing; expected rows as verl's PPO trainer sends them"
            )
    for i, inputs in enumerate(_per_row(data, "multi_modal_inputs") or ()):
        if inputs:
            raise ValueError(
                f"multi_modal_inputs: row {i} has {sorted(inputs)}; only text prompts are supported"
            )


def _per_row(data: TensorDict, name: str) -> list[Any] | None:
    if name not in data:
        return None
    values = data[name]
    return values.tolist() if hasattr(values, "tolist") else list(values)


def groups_of(data: TensorDict, vocab_size: int, max_prompt_tokens: int | None) -> list[Group]:
    """The rows' groups. Checks every token id and, if a limit is known, every prompt's length.

    A prompt that fills the limit was cut by verl, which truncates on the left and only warns.
    """
    prompts, responses = (list(data[name].unbind()) for name in ("prompts", "responses"))
    masks = list(data["loss_mask"].unbind())
    for i, (response, mask) in enumerate(zip(responses, masks, strict=True)):
        if response.shape != mask.shape:
            raise ValueError(
                f"loss_mask: row {i} has {tuple(mask.shape)} entries for a response of "
                f"{tuple(response.shape)}"
            )
    uids = _per_row(data, "uid")
    groups = group_rows(prompts, responses, None if uids is None else [str(u) for u in uids])
    for group in groups:
        _check_prompt(group, max_prompt_tokens)
        for tokens in (group.prompt, *(row.response for row in group.rows)):
            _check_ids(tokens, vocab_size)
    return groups


def _check_prompt(group: Group, limit: int | None) -> None:
    length = group.prompt.numel()
    if limit is not None and length >= limit:
        raise ValueError(
            f"data.max_prompt_length: the prompt of row {group.rows[0].index} has {length} tokens "
            f"and the limit is {limit}; verl cuts longer prompts on the left without an error, so "
            "a prompt at the limit can't be trusted. Set data.max_prompt_length above the longest "
            "prompt"
        )


def _check_ids(tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
        raise ValueError(
            f"token ids: expected 0 to {vocab_size - 1}, got {int(tokens.min())} to "
            f"{int(tokens.max())}; do the tokenizer and the model belong together?"
        )


def temperatures_of(data: TensorDict) -> list[float]:
    """Sampling temperature per row; verl sends one number or one per row."""
    value = data["temperature"] if "temperature" in data else 1.0
    rows = data.batch_size[0]
    if isinstance(value, Tensor) and value.numel() > 1:
        per_row = [float(t) for t in value.flatten().tolist()]
    else:
        per_row = [float(value)] * rows
    for i, temperature in enumerate(per_row):
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"temperature: expected a positive number, got {temperature} for row {i}"
            )
    if len(per_row) != rows:
        raise ValueError(f"temperature: expected one per row ({rows}), got {len(per_row)}")
    return per_row


def jagged_outputs(values: Sequence[Tensor]) -> Tensor:
    """[R_i] per row to the jagged layout verl reads: R_i values and one filler."""
    rows = [torch.cat([v, v.new_zeros(1)]) for v in values]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def loss_output(out: LogProbs, entropy: bool) -> dict[str, Tensor]:
    """One row's log-probs as the ``model_output`` of a loss function, graph attached."""
    named = {"log_probs": out.log_probs} | ({"entropy": out.entropy} if entropy else {})
    filled = {name: torch.cat([v, v.new_zeros(1)]) for name, v in named.items()}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            v, torch.tensor([0, v.numel()], device=v.device)
        )
        for name, v in filled.items()
    }


class LossRows:
    """Single rows of a batch for a loss function, the prompt reduced to its last token.

    Loss functions check that prompt and response lengths add up to the values given, and read only
    the response part; :func:`loss_output` gives R + 1 values.
    """

    def __init__(self, data: TensorDict, device: torch.device | str | int) -> None:
        heavy = [name for name in _PER_TOKEN_OF_PROMPT if name in data]
        self._data = data.exclude(*heavy, "prompts")
        self._last = [p[-1:] for p in data["prompts"].unbind()]
        self._device = device

    def __getitem__(self, index: int) -> TensorDict:
        row = tu.index_select_tensor_dict(self._data, [index])
        row["prompts"] = torch.nested.as_nested_tensor([self._last[index]], layout=torch.jagged)
        return row.to(self._device)
