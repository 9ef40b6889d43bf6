"""Inputs of the gated delta rule, its definition, and all results of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Inputs", "by_definition", "gradients", "in_float32", "inputs"]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def inputs(
    tokens: int, dtype: torch.dtype = torch.float64, rows: int = 2, seed: int = 0, **sizes: int
) -> Inputs:
    """Two key heads of 5 and four value heads of 3, keys of length 1, heads that do remember."""
    m, n, k, v = (sizes.get(name, size) for name, size in zip("mnkv", (2, 4, 5, 3), strict=True))
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(
        unit(noise(tokens, m, k), dim=-1).to(dtype),
        unit(noise(tokens, m, k), dim=-1).to(dtype),
        noise(tokens, n, v).to(dtype),
        (-noise(tokens, n).abs() * 0.1).to(wide),
        noise(tokens, n).sigmoid().to(wide),
        noise(n, k, v).to(wide),
    )


def by_definition(x: Inputs) -> tuple[Tensor, Tensor]:
    """Token by token, from the formula."""
    groups = x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(groups, dim=2) for t in (x.q, x.k))
    state, outputs = x.state, []
    for t in range(q.shape[1]):
        state = state * x.g[:, t, :, None, None].exp()
        error = x.v[:, t] - torch.einsum("bnkv,bnk->bnv", state, k[:, t])
        write = x.beta[:, t, :, None] * error
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], write)
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def in_float32(x: Inputs) -> tuple[Tensor, Tensor]:
    """The definition as plain torch would run it for inputs of 16 bits."""
    output, state = by_definition(Inputs(*(t.float() for t in x)))
    return output.to(x.q.dtype), state


def gradients(run: Any, x: Inputs) -> list[Tensor]:
    """Output, final state and six gradients, for fixed cotangents of both results."""
    leaves = Inputs(*(t.detach().clone().requires_grad_() for t in x))
    output, state = run(leaves)
    generator = torch.Generator().manual_seed(9)
    cotangents = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        for t in (output, state)
    ]
    torch.autograd.backward([output, state], cotangents)
    return [output.detach(), state.detach(), *(t.grad for t in leaves)]  # type: ignore[misc]
