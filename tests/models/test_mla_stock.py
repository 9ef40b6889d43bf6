"""Against the stock GLM-5.x and DeepSeek-V3.2 modules, where their version is right.

transformers 5.17 and later; earlier ones rotate, mask or cache them wrongly. In 5.17 the cache has
expanded keys and values, so gradients of a continuation are compared from 5.23 on, which keeps
latents.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache

from longstraw_backend.models.mla import mla_attention
from tests.models.mla_layers import Layer, make_layer, parameter_grads, relative, run_chunks
from tests.models.test_mla import TOKENS, inputs

VERSION = Version(transformers.__version__)
pytestmark = pytest.mark.skipif(
    Version("5.17") > VERSION, reason=f"stock DSA is wrong in transformers {VERSION}"
)
FAMILIES = ("glm_moe_dsa", "deepseek_v32")
each_family = pytest.mark.parametrize("family", FAMILIES)


def stock(
    layer: Layer,
    hidden: Tensor,
    start: int = 0,
    cache: DynamicCache | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The stock forward of tokens from ``start`` on, under the mask it needs."""
    stop = start + hidden.shape[1]
    mask = torch.ones(stop, stop, dtype=torch.bool).tril()[None, None, start:]
    shared = {} if selection is None else {"prev_topk_indices": selection}
    out: tuple[Tensor, ...] = layer.attn(
        hidden_states=hidden,
        position_embeddings=tuple(layer.rope(start, stop, hidden)),
        attention_mask=mask,
        past_key_values=cache,
        position_ids=torch.arange(start, stop)[None],
        **shared,
    )
    return out


@each_family
def test_one_pass_equals_stock(family: str) -> None:
    layer, hidden, cotangent = make_layer(family), inputs(), inputs(seed=2)
    (ours,) = run_chunks(layer, hidden, (TOKENS,))
    theirs = stock(layer, hidden)[0]
    assert (ours.hidden - theirs).abs().max() <= 1e-10
    grads = parameter_grads(layer.attn, (ours.hidden * cotangent).sum())
    for name, grad in parameter_grads(layer.attn, (theirs * cotangent).sum()).items():
        assert relative(grads[name], grad) <= 1e-9, name


@each_family
@pytest.mark.skipif(Version("5.23") > VERSION, reason="the stock cache expands keys and values")
def test_replay_equals_stock_over_its_own_cache(family: str) -> None:
    layer, hidden, cotangent = make_layer(family), inputs(), inputs(seed=2)
    cache = DynamicCache(config=layer.attn.config)
    with torch.no_grad():
        stock(layer, hidden[:, :40], cache=cache)
    theirs = stock(layer, hidden[:, 40:], 40, cache)[0]
    *_, ours = run_chunks(layer, hidden, (7, 33, 20))
    assert (ours.hidden - theirs).abs().max() <= 1e-10
    grads = parameter_grads(layer.attn, (ours.hidden * cotangent[:, 40:]).sum())
    for name, grad in parameter_grads(layer.attn, (theirs * cotangent[:, 40:]).sum()).items():
        assert relative(grads[name], grad) <= 1e-9, name


def test_shared_layer_equals_stock() -> None:
    types = ["full", "shared"]
    first = make_layer("glm_moe_dsa", indexer_types=types)
    second = make_layer("glm_moe_dsa", seed=5, index=1, indexer_types=types)
    assert second.kind == "shared" and second.attn.indexer is None
    hidden = inputs()
    selection = stock(first, hidden)[2]
    theirs = stock(second, hidden, selection=selection)[0]
    (full,) = run_chunks(first, hidden, (TOKENS,))
    rope = second.rope(0, TOKENS, hidden)
    ours = mla_attention(
        second.attn, second.spec, "shared", hidden, rope, [], selection_BSK=full.selection
    )
    assert (ours.hidden - theirs).abs().max() <= 1e-10
