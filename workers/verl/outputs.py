"""What one call of the engine returns to verl: per-row log-probs, losses, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict

from longstraw_backend.groups import Row
from longstraw_backend.kernels.logprob_head import LogProbs

from .batch import LossRows, jagged_outputs, loss_output

__all__ = ["BatchOutputs"]


class BatchOutputs:
    """Collects the rows of one call; with a loss function, runs it and the backward row by row.

    Attributes:
        entropy: whether entropies are wanted.
    """

    def __init__(
        self,
        data: TensorDict,
        loss_function: Callable[..., Any] | None,
        dp_group: Any,
        forward_only: bool,
    ) -> None:
        self.entropy = bool(tu.get_non_tensor_data(data, "calculate_entropy", default=False))
        kept = tu.get_non_tensor_data(data, "return_model_output", default=False)
        self._keep = forward_only or kept
        self._loss_function = loss_function
        self._dp_group = dp_group
        self._forward_only = forward_only
        self._rows = LossRows(data, get_device_id()) if loss_function is not None else None
        self._kept: dict[int, LogProbs] = {}
        self._losses: dict[int, float] = {}
        self._metrics: dict[str, Any] = {}

    def on_row(self, row: Row, out: LogProbs) -> None:
        """Loss and backward of one row. Losses of rows add up: global sizes normalise them."""
        if self._keep:
            self._kept[row.index] = LogProbs(out.log_probs.detach(), out.entropy.detach())
        if self._loss_function is None or self._rows is None:
            return
        loss, metrics = self._loss_function(
            model_output=loss_output(out, self.entropy),
            data=self._rows[row.index],
            dp_group=self._dp_group,
        )
        if not self._forward_only and loss.requires_grad:
            loss.backward()
        self._losses[row.index] = loss.detach().item()
        append_to_dict(self._metrics, metrics)

    def result(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The dictionary verl expects, rows in batch order, with further metrics of the call."""
        kept = [self._kept[i] for i in sorted(self._kept)]
        output = {}
        if kept:
            output["log_probs"] = jagged_outputs([k.log_probs for k in kept])
            if self.entropy:
                output["entropy"] = jagged_outputs([k.entropy for k in kept])
        named = {k: Metric(AggregationType.MEAN, v) for k, v in metrics.items()}
        losses = [self._losses[i] for i in sorted(self._losses)] or [1.0]
        return {"model_output": output, "loss": losses, "metrics": self._metrics | named}
