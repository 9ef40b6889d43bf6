"""Latent attention over resident latents against its definition in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw_backend.models.mla import Rope, mla_attention, rotate
from longstraw_backend.models.mla_spec import mla_spec
from longstraw_backend.oracle_latent import reference_attention
from tests.models.mla_layers import Layer, make_layer, parameter_grads, relative, run_chunks

FAMILIES = ("glm_moe_dsa", "deepseek_v32", "deepseek_v3")
each_family = pytest.mark.parametrize("family", FAMILIES)
TOKENS = 60
CHUNKS = ((60,), (37, 1, 22), (1,) * 5 + (55,), (20, 20, 20))


def inputs(batch: int = 1, seed: int = 1, width: int = 48) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, width, generator=g, dtype=torch.float64)


def reference(layer: Layer, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of one row [1, S, D]."""
    kind = options.pop("kind", layer.kind)
    rope = layer.rope(0, hidden.shape[1], hidden)
    return reference_attention(layer.attn, layer.spec, kind, hidden[0], rope, **options)


def mask_of(selection: Tensor, tokens: int) -> Tensor:
    seen = torch.zeros(selection.shape[0], tokens + 1, dtype=torch.bool)
    return seen.scatter(1, selection.long() % (tokens + 1), True)[:, :tokens]


@each_family
def test_one_pass_equals_the_definition(family: str) -> None:
    layer, hidden = make_layer(family), inputs().requires_grad_()
    (out,) = run_chunks(layer, hidden, (TOKENS,))
    expected, seen = reference(layer, hidden)
    if out.selection is not None:
        assert torch.equal(mask_of(out.selection[0], TOKENS), seen)
    assert (out.hidden[0] - expected).abs().max() <= 1e-10

    cotangent = inputs(seed=2)
    ours = parameter_grads(layer.attn, (out.hidden * cotangent).sum())
    theirs = parameter_grads(layer.attn, (expected * cotangent[0]).sum())
    assert ours.keys() == theirs.keys()
    assert {"q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"} <= ours.keys()
    for name, grad in ours.items():
        assert relative(grad, theirs[name]) <= 1e-9, name


@each_family
def test_gradient_of_the_input_equals_the_definition(family: str) -> None:
    layer, hidden, cotangent = make_layer(family), inputs().requires_grad_(), inputs(seed=2)
    (out,) = run_chunks(layer, hidden, (TOKENS,))
    expected, _ = reference(layer, hidden)
    (ours,) = torch.autograd.grad((out.hidden * cotangent).sum(), hidden)
    (theirs,) = torch.autograd.grad((expected * cotangent[0]).sum(), hidden)
    assert relative(ours, theirs) <= 1e-9


@each_family
@pytest.mark.parametrize("sizes", CHUNKS)
def test_chunks_equal_the_definition(family: str, sizes: tuple[int, ...]) -> None:
    layer, hidden = make_layer(family), inputs()
    with torch.no_grad():
        outs = run_chunks(layer, hidden, sizes)
        expected, _ = reference(layer, hidden)
    assert (torch.cat([o.hidden for o in outs], 1)[0] - expected).abs().max() <= 1e-10


@each_family
@pytest.mark.parametrize("boundary", [1, 5, 40])
def test_replay_has_the_gradient_with_constant_latents(family: str, boundary: int) -> None:
    """kv_b_proj's runs through resident latents; those of kv_a_* stop at the boundary."""
    layer, hidden, cotangent = make_layer(family), inputs(), inputs(seed=2)
    *_, out = run_chunks(layer, hidden, (boundary, TOKENS - boundary))
    expected, _ = reference(layer, hidden, boundary=boundary)
    ours = parameter_grads(layer.attn, (out.hidden * cotangent[:, boundary:]).sum())
    loss = (expected[boundary:] * cotangent[0, boundary:]).sum()
    for name, grad in parameter_grads(layer.attn, loss).items():
        assert relative(ours[name], grad) <= 1e-9, name


def test_shared_layer_uses_the_selection_it_is_given() -> None:
    first, second = make_layer("glm_moe_dsa"), make_layer("glm_moe_dsa", seed=5)
    hidden = inputs()
    for sizes in CHUNKS:
        outs = run_chunks(first, hidden, sizes)
        width = max(o.selection.shape[2] for o in outs)  # type: ignore[union-attr]
        selection = torch.cat([pad_to(o.selection, width) for o in outs], 1)
        shared = run_chunks(second, hidden, sizes, selection, kind="shared")
        seen = mask_of(selection[0], TOKENS)
        expected, _ = reference(second, hidden, kind="shared", seen=seen)
        assert (torch.cat([o.hidden for o in shared], 1)[0] - expected).abs().max() <= 1e-10
        assert all(o.index_keys is None and o.selection is not None for o in shared)


def pad_to(selection: Tensor | None, width: int) -> Tensor:
    assert selection is not None
    return nn.functional.pad(selection, (0, width - selection.shape[2]), value=-1)


def test_shared_layer_without_a_selection_is_refused() -> None:
    with pytest.raises(ValueError, match="shared layer needs that of a full layer"):
        run_chunks(make_layer("glm_moe_dsa"), inputs(), (TOKENS,), kind="shared")


@each_family
def test_rows_over_shared_and_own_pages_equal_single_rows(family: str) -> None:
    layer, hidden = make_layer(family), inputs(batch=3)
    hidden[:, :20] = hidden[:1, :20]
    with torch.no_grad():
        alone = [run_chunks(layer, hidden[i : i + 1], (20, 15, 25)) for i in range(3)]
        prompt, together = alone[0][0], run_chunks(layer, hidden, (20, 15, 25))
        latents, keys = [prompt.latents, together[1].latents], [prompt.index_keys]
        keys.append(together[1].index_keys)
        index_pages = [k for k in keys if k is not None]
        rope = layer.rope(35, TOKENS, hidden)
        rope = Rope(*(t.expand(3, -1, -1) for t in rope))
        where = layer.attn, layer.spec, layer.kind, hidden[:, 35:], rope, latents, index_pages
        out = mla_attention(*where)
    expected = torch.cat([a[2].hidden for a in alone])
    assert (out.hidden - expected).abs().max() <= 1e-12


@each_family
def test_last_token_changes_nothing_before_it(family: str) -> None:
    layer, hidden = make_layer(family), inputs()
    with torch.no_grad():
        (before,) = run_chunks(layer, hidden, (TOKENS,))
        hidden[:, -1] *= -3
        (after,) = run_chunks(layer, hidden, (TOKENS,))
    assert torch.equal(after.hidden[:, :-1], before.hidden[:, :-1])
    assert not torch.equal(after.hidden[:, -1], before.hidden[:, -1])


def test_planted_tokens_far_back_are_selected_and_attended_to() -> None:
    """Keys of three early tokens are made equal to what the last query looks for."""
    layer, hidden = make_layer("glm_moe_dsa"), inputs()
    planted = [0, 7, 31]
    with torch.no_grad():
        *_, last = run_chunks(layer, hidden, (50, 10))
        latents, keys = (torch.randn(1, 50, n, dtype=torch.float64) for n in (24, 16))
        rope = layer.rope(50, TOKENS, hidden)
        wanted = looked_for(layer, hidden[:, 50:], rope)
        keys[0, planted] = 50 * wanted
        call = layer.attn, layer.spec, "full", hidden[:, 50:], rope
        out = mla_attention(*call, [latents], [keys])
        assert out.selection is not None and set(planted) <= set(out.selection[0, -1].tolist())
        latents[0, planted] += 1.0
        moved = mla_attention(*call, [latents], [keys])
    assert (moved.hidden[0, -1] - out.hidden[0, -1]).abs().max() > 1e-3


def looked_for(layer: Layer, hidden: Tensor, rope: Rope) -> Tensor:
    """A direction along which the last query's score rises: sum_h w_h q_h over w_h > 0."""
    indexer, spec = layer.attn.indexer, layer.spec.index
    assert spec is not None
    low = layer.attn.q_a_layernorm(layer.attn.q_a_proj(hidden))
    q = indexer.wq_b(low).unflatten(-1, (spec.heads, spec.dim))
    q = torch.cat([rotate(q[..., :8], rope, spec.interleaved), q[..., 8:]], -1)[0, -1]
    weights = indexer.weights_proj(hidden)[0, -1]
    direction = (weights[:, None] * q)[weights > 0].sum(0)
    score = (weights * (q @ direction).relu()).sum()
    assert score > 0
    return direction / direction.norm()


class LowRank(nn.Module):
    """A linear layer with an adapter, as peft wraps it: ``weight`` is the base's alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features).to(base.weight))
        self.b = nn.Parameter(torch.randn(base.out_features, 4).to(base.weight))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


@each_family
def test_adapter_on_kv_b_proj_counts_and_is_trained(family: str) -> None:
    layer, hidden, cotangent = make_layer(family), inputs(), inputs(seed=2)
    layer.attn.kv_b_proj = LowRank(layer.attn.kv_b_proj)
    *_, out = run_chunks(layer, hidden, (40, 20))
    expected, _ = reference(layer, hidden, boundary=40)
    assert (out.hidden[0] - expected[40:]).abs().max() <= 1e-10
    ours = parameter_grads(layer.attn, (out.hidden * cotangent[:, 40:]).sum())
    theirs = parameter_grads(layer.attn, (expected[40:] * cotangent[0, 40:]).sum())
    for name in ("kv_b_proj.base.weight", "kv_b_proj.a", "kv_b_proj.b"):
        assert relative(ours[name], theirs[name]) <= 1e-9, name


@each_family
def test_autocast_computes_attention_as_in_its_dtype(family: str) -> None:
    """float32 parameters under bfloat16 autocast: about the error of the same in bfloat16."""
    layer, half = make_layer(family, torch.float32), make_layer(family, torch.bfloat16)
    hidden = inputs().float()
    exact, _ = reference(make_layer(family), inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = run_chunks(layer, hidden, (40, 20))
    plain = run_chunks(half, hidden.bfloat16(), (40, 20))
    assert out[1].latents.dtype == torch.bfloat16
    errors = [relative(o[1].hidden[0].double(), exact[40:]) for o in (out, plain)]
    assert errors[0] <= 2 * errors[1] + 0.01
    out[1].hidden.sum().backward()
    assert layer.attn.kv_b_proj.weight.grad is not None


@each_family
def test_scoring_and_replay_have_the_same_bits(family: str) -> None:
    layer, hidden = make_layer(family, torch.float32), inputs().float()
    with torch.no_grad():
        scored = run_chunks(layer, hidden, (40, 20))[1]
    replayed = run_chunks(layer, hidden, (40, 20))[1]
    assert torch.equal(scored.hidden, replayed.hidden) and replayed.hidden.requires_grad


def test_query_without_low_rank() -> None:
    layer, hidden = make_layer("deepseek_v3", q_lora_rank=None), inputs()
    *_, out = run_chunks(layer, hidden, (40, 20))
    expected, _ = reference(layer, hidden)
    assert (out.hidden[0] - expected[40:]).abs().max() <= 1e-10


def test_half_split_rotation_of_deepseek_v3_options() -> None:
    layer = make_layer("deepseek_v3", rope_interleave=False)
    assert not layer.spec.interleaved
    assert stock_difference(layer) <= 1e-10


def test_deepseek_v3_equals_the_stock_module() -> None:
    assert stock_difference(make_layer("deepseek_v3")) <= 1e-10


def test_yarn_scale_of_deepseek_v3_equals_the_stock_module() -> None:
    yarn = dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=16.0,
        mscale=1.0,
        mscale_all_dim=0.7,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
    )
    layer = make_layer("deepseek_v3", rope_parameters=yarn)
    assert layer.spec.scale == pytest.approx(layer.attn.scaling, rel=1e-15)
    assert layer.spec.scale > (10 + 8) ** -0.5
    assert stock_difference(layer) <= 1e-10
    glm = make_layer("glm_moe_dsa", rope_parameters=yarn)
    assert glm.spec.scale == layer.spec.scale  # which 5.10's own module misses


def stock_difference(layer: Layer) -> float:
    hidden = inputs()
    with torch.no_grad():
        stock = layer.attn(hidden, tuple(layer.rope(0, TOKENS, hidden)), None)[0]
        outs = run_chunks(layer, hidden, (37, 1, 22))
    return (torch.cat([o.hidden for o in outs], 1) - stock).abs().max().item()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_keeps_products_at_equal_distance(interleaved: bool) -> None:
    layer = make_layer("glm_moe_dsa")
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    products = []
    for start in (0, 1000):
        ropes = [layer.rope(start + d, start + d + 1, q) for d in (7, 0)]
        turned = [rotate(x[None], r, interleaved) for x, r in zip((q, k), ropes, strict=True)]
        products.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(*products, rtol=0, atol=1e-4)  # angles are float32


def test_unknown_family_with_an_indexer_is_refused() -> None:
    class Config:
        model_type, index_topk, rope_parameters = "other", 4, None
        num_attention_heads = qk_nope_head_dim = qk_rope_head_dim = v_head_dim = kv_lora_rank = 8

    with pytest.raises(ValueError, match="'other' has an indexer whose RoPE convention"):
        mla_spec(Config())


def test_selection_is_capped_by_the_tokens_there_are() -> None:
    layer = make_layer("glm_moe_dsa")
    assert layer.spec.index is not None
    layer = replace(layer, spec=replace(layer.spec, index=replace(layer.spec.index, k=2048)))
    (out,) = run_chunks(layer, inputs(), (TOKENS,))
    expected, _ = reference(layer, inputs())
    assert out.selection is not None and out.selection.shape == (1, TOKENS, TOKENS)
    assert (out.hidden[0] - expected).abs().max() <= 1e-10
