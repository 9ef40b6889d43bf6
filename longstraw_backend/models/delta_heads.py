"""What a gated-delta-net layer does between its projections and its norm: convolution, gates, rule.

All of it works on each head and its channels alone, over the tokens in order: any heads of a layer
make a layer of their own.

Legend: B rows, T tokens, C convolution channels (queries, keys, values, in this order), W width of
the convolution, M key heads, N value heads, K and V their dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from longstraw_backend.kernels.delta_rule import gated_delta_rule
from longstraw_backend.state import Recurrent

__all__ = ["DeltaHeads"]


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a layer with their weights.

    Attributes:
        conv_weight: [C, 1, W].
        conv_bias: [C] or None.
        A_log, dt_bias: of the decay, [N].
        activation: after the convolution, as transformers names it.
        key_heads: M.
        key_dim: K.
        value_dim: V.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str
    key_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, mixer: Any) -> DeltaHeads:
        """All heads of a stock module."""
        return cls(
            mixer.conv1d.weight,
            mixer.conv1d.bias,
            mixer.A_log,
            mixer.dt_bias,
            mixer.activation,
            mixer.num_k_heads,
            mixer.head_k_dim,
            mixer.head_v_dim,
        )

    @property
    def value_heads(self) -> int:
        return self.A_log.shape[0]

    def nothing(self, x_BTC: Tensor) -> Recurrent:
        """The state before the first token, for rows like those of ``x_BTC``."""
        rows, wide = x_BTC.shape[0], torch.promote_types(x_BTC.dtype, torch.float32)
        channels, _, width = self.conv_weight.shape
        heads = self.value_heads, self.key_dim, self.value_dim
        return Recurrent(
            x_BTC.new_zeros(rows, channels, width - 1), x_BTC.new_zeros(rows, *heads, dtype=wide)
        )

    def run(
        self,
        x_BTC: Tensor,
        b_BTN: Tensor,
        a_BTN: Tensor,
        before: Recurrent,
        *,
        final_state: bool = True,
    ) -> tuple[Tensor, Recurrent | None]:
        """Outputs [B, T, N, V] of T tokens, and, if wanted, the state after the last.

        Args:
            x_BTC: columns before the convolution.
            b_BTN: logits of the writing strength.
            a_BTN: logits of the decay.
            before: state before the first token.
        """
        columns = torch.cat([before.conv, x_BTC.transpose(1, 2)], dim=2)
        rule = *self.mixed(columns), self.decay(a_BTN), b_BTN.sigmoid(), before.recurrent
        out_BTNV, recurrent = gated_delta_rule(*rule, final_state=final_state)
        if recurrent is None:
            return out_BTNV, None
        # a copy: a view would keep the whole chunk alive
        return out_BTNV, Recurrent(columns[:, :, -before.conv.shape[2] :].clone(), recurrent)

    def mixed(self, columns_BCS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, M, K], of length 1, and values [B, T, N, V], of the last T of
        T + W - 1 columns."""
        conv = F.conv1d(
            columns_BCS, self.conv_weight, self.conv_bias, groups=self.conv_weight.shape[0]
        )
        mixed: Tensor = ACT2FN[self.activation](conv)
        q, k, v = self.split(mixed.transpose(1, 2))
        dims = (q, self.key_dim), (k, self.key_dim), (v, self.value_dim)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in dims)
        return _unit(q), _unit(k), v

    def decay(self, a_BTN: Tensor) -> Tensor:
        """Logarithm of the decay [B, T, N]; float32 as in the stock module, also for float64
        models."""
        return -self.A_log.float().exp() * F.softplus(a_BTN.float() + self.dt_bias)

    def split(self, x_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels, the last dim, of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        q, k, v = x_C.split([keys, keys, self.value_heads * self.value_dim], dim=-1)
        return q, k, v


def _unit(x: Tensor) -> Tensor:
    """Heads scaled to length 1, as the stock kernels do it (epsilon 1e-6 under the root)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
