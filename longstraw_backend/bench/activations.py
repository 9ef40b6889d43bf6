"""Bytes of what is alive beside weights and state while a block is run, by formula.

Read off the code that runs: stock projections and norms, our attention over pages with its merge in
a wide dtype, the stock grouped experts, the delta rule. Of each layer, per token of the block:

    forward    alive at most inside the layer, without a graph
    graph      what autograd keeps of it for the backward
    backward   alive at most beside that graph in its backward
    kept       for a recomputation: the layer's input, and what attention over all tokens gave

Workspaces of libraries are not in it, nor is what the allocator can't use. Nothing depends on the
length of the prompt, but for state that is brought over from CPU memory.

Legend, in elements: D hidden size, F feed-forward width; N heads, K key/value heads, H their width;
e bytes of an element, w of a wide one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longstraw_backend.kernels.index_topk.scores import KEY_BLOCK, QUERY_ROWS
from longstraw_backend.kernels.sparse_mla.selected import BLOCK_ELEMENTS
from longstraw_backend.models.block_traffic import has_experts
from longstraw_backend.models.families import layer_types_of
from longstraw_backend.models.mla_spec import mla_spec
from longstraw_backend.models.sizes import ModelSizes, head_width

__all__ = ["LayerBytes", "fixed_bytes", "head_bytes", "layer_bytes"]

WIDE = 4
"""Bytes of float32: norms, merges, log-sum-exps, recurrent states."""
_DELTA_CHUNK = 64


@dataclass(frozen=True)
class LayerBytes:
    """Of a layer or of a part of it, per token of the block; see the table."""

    forward: int
    graph: int
    backward: int
    kept: int = 0


def layer_bytes(
    config: Any, sizes: ModelSizes, *, element: int, lora: int, fused_rule: bool
) -> list[LayerBytes]:
    """Of each layer.

    Args:
        element: bytes of an element of activations.
        lora: rank of adapters, 0 if all parameters are trained.
        fused_rule: the delta rule is one kernel, not plain torch.
    """
    kinds, routed = layer_types_of(config), has_experts(config)
    adapted = not any(routed)  # adapters of models with experts are on attention alone
    found = []
    for kind, experts, layer in zip(kinds, routed, sizes.layers, strict=True):
        mixer = _mixer(config, kind, element, not lora, fused_rule)
        ffn = (
            _experts(config, element) if experts else _mlp(config, element, lora if adapted else 0)
        )
        norms = _norm(config.hidden_size, not lora) + element * config.hidden_size
        adapters = layer.inputs * WIDE if lora and element < WIDE else 0  # adapters are float32
        graph = mixer.graph + ffn.graph + 2 * norms + adapters
        beside = max(ffn.backward, mixer.backward - ffn.graph)
        residual, kept = 2 * element * config.hidden_size, element * config.hidden_size
        kept += _attended(config, kind, element)
        found.append(LayerBytes(residual + max(mixer.forward, ffn.forward), graph, beside, kept))
    return found


def head_bytes(config: Any, element: int, head_chunk: int) -> int:
    """Logits of a chunk of tokens, as they come and in three wide copies."""
    return head_chunk * int(config.vocab_size) * (element + 3 * WIDE)


def fixed_bytes(config: Any, tokens: int, keys: int) -> int:
    """Of a block of so many tokens, up to a limit: gathered rows and scores of sparse attention,
    index scores of all ``keys``, and their copies."""
    if not {"full", "shared"} & set(layer_types_of(config)):
        return 0
    spec = mla_spec(config)
    assert spec.index is not None
    rows = spec.index.k * (spec.heads + spec.latent + spec.rope)
    products = min(QUERY_ROWS, tokens * spec.index.heads) * min(KEY_BLOCK, keys)
    return WIDE * (4 * min(BLOCK_ELEMENTS, tokens * rows) + products)


def _norm(width: int, trained: bool) -> int:
    """Graph of an RMS norm: its wide input, and what the weight is multiplied with."""
    return WIDE * width * (2 if trained else 1)


def _mixer(config: Any, kind: str, e: int, trained: bool, fused_rule: bool) -> LayerBytes:
    if kind == "full_attention":
        return _attention(config, e, trained)
    if kind == "linear_attention":
        return _delta_net(config, e, fused_rule)
    return _latent(config, kind, e, trained)


def _attended(config: Any, kind: str, e: int) -> int:
    """Output and log-sum-exp of attention over all tokens; other kinds keep none."""
    if kind == "full_attention":
        return int(config.num_attention_heads) * (head_width(config) * e + WIDE)
    if kind != "dense":
        return 0
    spec = mla_spec(config)
    return spec.heads * ((spec.latent + spec.rope) * e + WIDE)


def _attention(config: Any, e: int, trained: bool) -> LayerBytes:
    """Forward: query, folded query, gate, a page's output; merged output and one more of a merge.
    Backward: dq wide; dout, query and output folded, dq of a page."""
    width = config.num_attention_heads * head_width(config)
    keys = config.num_key_value_heads * head_width(config)
    gated = 1 if config.model_type.startswith(("qwen3_5", "qwen3_next")) else 0
    normed = "qwen3" in config.model_type
    forward = e * (width * (3 + gated) + 2 * keys) + 2 * WIDE * width
    norms = _norm(width + keys, trained) if normed else 0
    graph = norms + e * (width * (3 + 2 * gated) + 2 * keys)
    return LayerBytes(forward, graph, (WIDE + 5 * e) * width)


def _delta_net(config: Any, e: int, fused_rule: bool) -> LayerBytes:
    """Columns before, in and after the convolution, gate, heads of the rule; then the gated norm.
    A fused rule also has products of a chunk and the state before each, plain torch wide copies."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    values, columns = heads * v, 2 * groups * k + heads * v
    taken = e * (3 * columns + values + 2 * groups * k + 2 * heads * k)
    states = heads * k * v // _DELTA_CHUNK
    if fused_rule:
        rule = e * (heads * (k + 4 * v) + states) + heads * _DELTA_CHUNK * (WIDE + e)
        kept = e * (2 * heads * k + values + heads * _DELTA_CHUNK)
        back = e * (6 * heads * (k + v) + 2 * states)
    else:
        rule = WIDE * (3 * heads * k + 3 * values) + e * values
        kept = WIDE * (6 * heads * k + 6 * values + 8 * heads * _DELTA_CHUNK)
        back = WIDE * 3 * heads * (k + v)
    gated_norm = e * (columns + 2 * values) + 5 * WIDE * values
    graph = e * (2 * columns + 3 * values) + WIDE * (2 * groups * k + 5 * values) + kept
    return LayerBytes(max(taken + rule, gated_norm), graph, back)


def _latent(config: Any, kind: str, e: int, trained: bool) -> LayerBytes:
    """Queries as projected, in the latent space and with RoPE; outputs there; selections. A dense
    layer is attention with values as wide as keys."""
    spec = mla_spec(config)
    low = getattr(config, "q_lora_rank", None) or 0
    query = spec.heads * (spec.nope + spec.rope)
    wide = spec.heads * (spec.latent + spec.rope)
    out, values = spec.heads * spec.latent, spec.heads * spec.value
    picked = 0
    if spec.index is not None:
        candidates = 4 * spec.index.k * 6  # scores and positions, before and after, and sorted
        picked = candidates + 2 * e * spec.index.heads * spec.index.dim
    forward = e * (low + query + 2 * out + wide) + picked
    dense = wide if kind == "dense" else 0
    forward += dense * (e + 2 * WIDE)
    graph = _norm(low, trained) + e * (low + query + wide + out + values) + 4 * picked // 24
    graph += e * dense  # outputs as wide as keys
    return LayerBytes(forward, graph, e * (2 * wide + 2 * out) + dense * (WIDE + 3 * e))


def _mlp(config: Any, e: int, lora: int) -> LayerBytes:
    """Gate, its activation, the other half, their product. An adapter's output, its multiple and
    the sum are wide."""
    width = config.intermediate_size
    forward = 2 * e + 3 * WIDE if lora else 3 * e
    return LayerBytes(forward * width, 4 * e * width, 3 * e * width)


def _experts(config: Any, e: int) -> LayerBytes:
    """Rows of chosen experts: as gathered, made, weighted and put back; the halves between. Shared
    experts run after them."""
    rows = config.num_experts_per_tok * config.hidden_size
    inner = config.num_experts_per_tok * config.moe_intermediate_size
    forward = e * max(4 * rows, rows + 4 * inner)
    return LayerBytes(forward, e * (2 * rows + 4 * inner), e * (3 * rows + 2 * inner))
