"""The log-prob head against log_softmax over all logits at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw_backend.kernels.logprob_head import LogProbs, logprob_head
from tests.kernels.accuracy import assert_as_accurate

TOKENS, HIDDEN, VOCAB = 23, 12, 37


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: Tensor
    dlog_probs: Tensor
    dentropy: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        fields = {name: value.to(dtype) for name, value in vars(self).items() if name != "targets"}
        return Inputs(targets=self.targets, **fields)


def make_inputs(
    dtype: torch.dtype, tokens: int = TOKENS, hidden: int = HIDDEN, vocab: int = VOCAB
) -> Inputs:
    g = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(
        torch.randn(tokens, hidden, generator=g, dtype=torch.float64).to(dtype),
        torch.randn(vocab, hidden, generator=g, dtype=torch.float64).to(dtype),
        torch.randint(vocab, (tokens,), generator=g),
        torch.rand(tokens, generator=g).to(wide) + 0.5,
        torch.randn(tokens, generator=g, dtype=torch.float64).to(wide),
        torch.randn(tokens, generator=g, dtype=torch.float64).to(wide),
    )


def plain_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: Any, entropy: bool, **_: Any
) -> LogProbs:
    logits = (hidden @ weight.mT).to(torch.promote_types(weight.dtype, torch.float32))
    logits = logits / torch.as_tensor(temperature, dtype=logits.dtype).expand(len(targets))[:, None]
    log_p = logits.log_softmax(-1)
    ent = -(log_p.exp() * log_p).sum(-1) if entropy else log_p.new_zeros(len(targets))
    return LogProbs(log_p.gather(1, targets[:, None])[:, 0], ent)


def value_and_grads(head: Any, inputs: Inputs, **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    out = head(*leaves, inputs.targets, **options)
    loss = (out.log_probs * inputs.dlog_probs).sum() + (out.entropy * inputs.dentropy).sum()
    return [*(t.detach() for t in out), *torch.autograd.grad(loss, leaves)]


each_chunk = pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
with_or_without_entropy = pytest.mark.parametrize("entropy", [False, True])


@each_chunk
@with_or_without_entropy
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_values_and_gradients_match_log_softmax(
    chunk: int, entropy: bool, temperature: float | str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(dtype)
    tau = inputs.temperature if temperature == "per token" else temperature
    ours = value_and_grads(
        logprob_head, inputs, temperature=tau, entropy=entropy, chunk_tokens=chunk
    )
    plain = value_and_grads(plain_head, inputs, temperature=tau, entropy=entropy)
    if dtype == torch.float64:
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    else:
        exact = value_and_grads(
            plain_head, inputs.to(torch.float64), temperature=tau, entropy=entropy
        )
        # p = exp(z - logsumexp z): a relative rounding of z is max|z| times as large in p.
        logits = inputs.hidden @ inputs.weight.mT / inputs.temperature.min()
        assert_as_accurate(ours, plain, exact, conditioning=logits.abs().max().item())


@with_or_without_entropy
@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_bfloat16_is_as_accurate_as_log_softmax(chunk: int, entropy: bool) -> None:
    inputs = make_inputs(torch.bfloat16, tokens=64, hidden=64, vocab=200)
    options = dict(temperature=1.0, entropy=entropy, chunk_tokens=chunk)
    ours = value_and_grads(logprob_head, inputs, **options)
    plain = value_and_grads(plain_head, inputs, **options)
    exact = value_and_grads(plain_head, inputs.to(torch.float64), **options)
    assert [t.dtype for t in ours] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert_as_accurate(ours, plain, exact)


@with_or_without_entropy
def test_gradients_match_finite_differences(entropy: bool) -> None:
    inputs = make_inputs(torch.float64, tokens=5, hidden=3, vocab=7)

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = logprob_head(
            hidden,
            weight,
            inputs.targets,
            temperature=inputs.temperature,
            entropy=entropy,
            chunk_tokens=2,
        )
        return tuple(out) if entropy else out[:1]

    leaves = [t.requires_grad_() for t in (inputs.hidden, inputs.weight)]
    assert torch.autograd.gradcheck(head, leaves)


def test_entropy_alone_has_a_gradient() -> None:
    inputs = make_inputs(torch.float64)
    hidden = inputs.hidden.requires_grad_()
    args = hidden, inputs.weight, inputs.targets
    ours = torch.autograd.grad(logprob_head(*args, entropy=True).entropy.sum(), hidden)
    plain = plain_head(*args, temperature=1.0, entropy=True).entropy.sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, hidden), rtol=0, atol=1e-10)


def test_weight_shared_with_the_embedding_collects_both_gradients() -> None:
    inputs, tokens = make_inputs(torch.float64), torch.arange(TOKENS) % VOCAB
    grads = []
    for head in (logprob_head, plain_head):
        weight = inputs.weight.detach().requires_grad_()
        out = head(weight[tokens].tanh(), weight, inputs.targets, temperature=1.0, entropy=True)
        grads.append(torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), weight)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_inputs_that_need_gradients_get_them(frozen: str) -> None:
    inputs = make_inputs(torch.float64)
    leaves = {n: getattr(inputs, n).requires_grad_(n != frozen) for n in ("hidden", "weight")}
    logprob_head(*leaves.values(), inputs.targets).log_probs.sum().backward()
    assert leaves[frozen].grad is None
    assert all(t.grad is not None for n, t in leaves.items() if n != frozen)


def test_hidden_states_may_be_wider_than_the_weight() -> None:
    inputs = make_inputs(torch.bfloat16)
    hidden = inputs.hidden.float().requires_grad_()
    out = logprob_head(hidden, inputs.weight, inputs.targets)
    assert torch.equal(
        out.log_probs, logprob_head(inputs.hidden, inputs.weight, inputs.targets).log_probs
    )
    (grad,) = torch.autograd.grad(out.log_probs.sum(), hidden)
    assert grad.dtype == torch.float32


def test_no_tokens() -> None:
    inputs = make_inputs(torch.float32, tokens=0)
    out = value_and_grads(logprob_head, inputs, entropy=True)
    assert [tuple(t.shape) for t in out] == [(0,), (0,), (0, HIDDEN), (VOCAB, HIDDEN)]
    assert not out[3].any()


class LargestResult(TorchDispatchMode):
    """Remembers the most elements any operation returned, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@with_or_without_entropy
def test_logits_of_more_than_a_chunk_never_exist(entropy: bool) -> None:
    chunk, inputs = 4, make_inputs(torch.float32, tokens=64, hidden=2, vocab=500)
    with LargestResult() as plain:
        value_and_grads(plain_head, inputs, temperature=1.0, entropy=entropy)
    assert plain.numel == 64 * 500
    with LargestResult() as ours:
        value_and_grads(logprob_head, inputs, entropy=entropy, chunk_tokens=chunk)
    assert ours.numel == chunk * 500


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((5, 8), (11, 7), (5,)), "hidden (5, 8), weight (11, 7), targets (5,): expected [T, D]"),
        (((5, 8), (11, 8), (4,)), "targets (4,): expected [T, D], [V, D], [T]"),
    ],
)
def test_rejects_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], text: str) -> None:
    hidden, weight, targets = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError) as error:
        logprob_head(hidden, weight, targets.long())
    assert text in str(error.value)


def test_rejects_an_empty_chunk() -> None:
    inputs = make_inputs(torch.float32)
    with pytest.raises(ValueError, match="chunk_tokens: expected at least 1, got 0"):
        logprob_head(inputs.hidden, inputs.weight, inputs.targets, chunk_tokens=0)


@pytest.mark.parametrize(
    "temperature", [0.0, -1.0, float("nan"), torch.ones(4), torch.tensor([1.0] * 22 + [0.0])]
)
def test_rejects_a_temperature_that_is_not_positive(temperature: Any) -> None:
    inputs = make_inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature: expected a positive number, or 23 of them"):
        logprob_head(inputs.hidden, inputs.weight, inputs.targets, temperature=temperature)
