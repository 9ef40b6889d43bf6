"""Attention over one piece of the keys, returning the log-sum-exp that merging needs.

``Partial`` is what a kernel must provide; ``reference`` is plain torch, the others call kernels
that ship with torch. Which one runs depends on the device and the dtype alone, never on the phase:
scoring and replay must agree bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

__all__ = ["IMPLS", "Impl", "Partial", "choose_impl", "get_partial"]

Impl = Literal["reference", "cpu", "flash", "cudnn"]
IMPLS: tuple[str, ...] = get_args(Impl)


class Partial(Protocol):
    """Attention of q over one piece of keys: all [B, heads, tokens, H], lse [B, heads, tokens].

    ``causal`` pieces have as many keys as queries and as many key heads as query heads;
    the others may have fewer key heads only if the queries were folded accordingly.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp (float32, or float64 for float64 inputs)."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this piece's dq, dk, dv, given the merged output and the global log-sum-exp."""
        ...

    def backward_q(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Tensor:
        """Return this piece's dq only: a resident page takes no gradient."""
        ...


def choose_impl(device: torch.device, dtype: torch.dtype) -> Impl:
    """The kernel for a device and dtype; the same for every phase of a process."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "cudnn" if torch.cuda.get_device_capability(device) >= (9, 0) else "flash"
    return "reference"


def get_partial(impl: Impl) -> Partial:
    """Look a kernel up by name; raises ValueError for an unknown one."""
    try:
        return _PARTIALS[impl]
    except KeyError:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}") from None


class ReferencePartial:
    """The definition, in plain torch. Holds the score matrix: for tests and unusual dtypes."""

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * scale
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse

    def _probs_and_dscores(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        probs = (self._scores(q, k, causal, scale) - lse[..., None]).exp()
        dout = dout.to(probs.dtype)
        delta = (dout * out.to(probs.dtype)).sum(-1, keepdim=True)
        return probs, probs * (dout @ v.to(probs.dtype).mT - delta) * scale

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        probs, ds = self._probs_and_dscores(dout, q, k, v, out, lse, causal, scale)
        dq, dk, dv = ds @ k.to(ds.dtype), ds.mT @ q.to(ds.dtype), probs.mT @ dout.to(ds.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def backward_q(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Tensor:
        _, ds = self._probs_and_dscores(dout, q, k, v, out, lse, False, scale)
        return (ds @ k.to(ds.dtype)).to(q.dtype)


class _BackwardQ:
    """dq by the full backward of a fused kernel that has no cheaper form; dk and dv are dropped."""

    backward: Any

    def backward_q(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Tensor:
        dq: Tensor = self.backward(dout, q, k, v, out, lse, False, scale)[0]
        return dq


class CpuPartial(_BackwardQ):
    """torch's tiled attention for CPUs (float32, float64, bfloat16)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
        return dq, dk, dv


@dataclass(frozen=True)
class CudaPartial(_BackwardQ):
    """torch's flash or cuDNN attention on CUDA (float16, bfloat16).

    cuDNN refuses one query over one key, so that case takes the definition instead; it depends on
    shapes alone and is therefore the same in scoring and in replay.
    """

    kind: Literal["flash", "cudnn"]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if q.shape[2] == k.shape[2] == 1:
            return _REFERENCE.forward(q, k, v, causal, scale)
        if self.kind == "flash":
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, scale=scale
            )
            return out, lse
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(lse.shape[:3])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[2] == k.shape[2] == 1:
            return _REFERENCE.backward(dout, q, k, v, out, lse, causal, scale)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is 0: never read
        lengths = q.shape[2], k.shape[2]
        if self.kind == "flash":
            op = torch.ops.aten._scaled_dot_product_flash_attention_backward
            grads = op(
                dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed, scale=scale
            )
        else:
            op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
            none = None, None, None
            grads = op(
                dout,
                q,
                k,
                v,
                out,
                lse[..., None],
                seed,
                seed,
                *none,
                *lengths,
                0.0,
                causal,
                scale=scale,
            )
        return grads[0], grads[1], grads[2]


_REFERENCE = ReferencePartial()
_PARTIALS: dict[str, Partial] = {
    "reference": _REFERENCE,
    "cpu": CpuPartial(),
    "flash": CudaPartial("flash"),
    "cudnn": CudaPartial("cudnn"),
}
