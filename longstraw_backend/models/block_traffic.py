"""What each rank sends to the others for one block of tokens, layer by layer, in bytes.

With R ranks a rank sends (R - 1) / R times this for a token of the block and layer, whoever's token
it is; all ranks send alike:

    layer             purpose      forward                               backward
    full attention    attention    2 K H e + [N (2 H e + w)]             2 K H (e + w)
                                                                         + [N (H (3 e + w) + w)]
    dense MLA         latent       full attention's with K = 1, H = C    the same
    sparse MLA        latent       N (C e + V e + w) + 4 k               N (C e + V e + w)
    with an indexer   selection    I (D e + w) + k (w + 4)               0
    delta net, head   delta_rule   e (M + 2 N + N V) / R                 the same
    log-probs         log_probs    2 w                                   0

[...] only where tokens come before the block. Other kinds, for a block of T tokens:

    delta net by position          (R - 1) (w N K (K + V) + e M W)       the same
    experts over P ranks           (P - 1) / P (2 a D e T / R + 8 E)     (P - 1) / P 2 a D e T / R

Recomputation under activation checkpointing sends what the forward does, but for what is kept: the
selection, and what attention over all tokens gave (full attention, dense MLA). Formulas are those
of ``parallel/`` and ``delta_by_*.py``; what FSDP moves is in none of them, see
:func:`gathered_parameter_bytes` and ``parallel/traffic.py``.

Legend: e bytes of an element in the dtype of computation, w of a wide one (4, or 8 in float64).
N query (delta net: value) heads, K key/value heads of width H (delta net: key width K, value width
V, M channels of the convolution with a key head counted once for each rank that has it, W the width
of the convolution - 1, at most T / R), C latent + RoPE width, V latent width, k tokens selected, at
most those there are, I index heads of width D; a experts of a token of hidden size D, out of E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longstraw_backend.parallel.traffic import Purpose

from .delta_by_head import can_share
from .families import layer_types_of
from .mla_spec import mla_spec
from .sizes import head_width, num_routed

__all__ = [
    "Sent",
    "Split",
    "backward_bytes",
    "delta_net_by_head",
    "delta_net_by_position",
    "dense_latent_attention",
    "experts",
    "forward_bytes",
    "full_attention",
    "gathered_parameter_bytes",
    "has_experts",
    "layer_bytes",
    "log_probs",
    "selection",
    "sparse_latent_attention",
]


@dataclass(frozen=True)
class Split:
    """Ranks that share the tokens of a prompt, and those that share a layer's experts.

    Attributes:
        ranks: R.
        expert_ranks: P; 1 if every rank has all experts.
        element: bytes of an element in the dtype of computation.
    """

    ranks: int
    expert_ranks: int = 1
    element: int = 2

    @property
    def wide(self) -> int:
        """Bytes of log-sum-exps, scores, recurrent states and sums of gradients."""
        return max(4, self.element)

    def own(self, block: range) -> int:
        """Tokens of each rank.

        Raises:
            ValueError: the block can't be cut into equal runs.
        """
        if len(block) % self.ranks:
            raise ValueError(
                f"block: expected a multiple of {self.ranks} tokens, one run for each rank, "
                f"got {len(block)}; round it up, padding is sent too"
            )
        return len(block) // self.ranks

    def leaving(self, block: range) -> int:
        """T (R - 1) / R: what is sent for each token goes to others so often."""
        return self.own(block) * (self.ranks - 1)


class Sent(NamedTuple):
    """Bytes that leave a rank for others in a layer's forward and backward of one block.

    ``kept`` says that a recomputation sends nothing.
    """

    forward: int
    backward: int
    kept: bool = False


LayerFormula = Callable[[Any, range, Split], Sent]
"""From a Hugging Face text configuration, absolute positions of the block's tokens, and ranks."""


def full_attention(config: Any, block: range, split: Split) -> Sent:
    """Attention over owners of pages; see the table."""
    heads = config.num_attention_heads
    width = head_width(config)
    return _owners_attention(heads, config.num_key_value_heads, width, block, split)


def dense_latent_attention(config: Any, block: range, split: Split) -> Sent:
    """The same with one key/value head, the latent with its rotated key."""
    spec = mla_spec(config)
    return _owners_attention(spec.heads, 1, spec.latent + spec.rope, block, split)


def _owners_attention(heads: int, kv_heads: int, width: int, block: range, split: Split) -> Sent:
    e, w, resident = split.element, split.wide, block.start > 0
    forward, backward = 2 * kv_heads * width * e, 2 * kv_heads * width * (e + w)
    if resident:
        forward += heads * (2 * width * e + w)
        backward += heads * (width * (3 * e + w) + w)
    return Sent(split.leaving(block) * forward, split.leaving(block) * backward, kept=True)


def sparse_latent_attention(config: Any, block: range, split: Split) -> Sent:
    """Queries and selections to the owners of latents, outputs back."""
    spec = mla_spec(config)
    e, w, selected = split.element, split.wide, _selected(config, block)
    both = spec.heads * ((spec.latent + spec.rope) * e + spec.latent * e + w)
    return Sent(split.leaving(block) * (both + 4 * selected), split.leaving(block) * both)


def selection(config: Any, block: range, split: Split) -> Sent:
    """The indexer of a layer that selects: queries to the owners of keys, candidates back."""
    index = mla_spec(config).index
    assert index is not None
    e, w = split.element, split.wide
    queries = index.heads * (index.dim * e + w)
    candidates = _selected(config, block) * (w + 4)
    return Sent(split.leaving(block) * (queries + candidates), 0, kept=True)


def _selected(config: Any, block: range) -> int:
    return min(int(config.index_topk), block.stop)


def delta_net_by_head(config: Any, block: range, split: Split) -> Sent:
    """Columns and gates to the owners of heads, outputs back."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    copies = max(1, split.ranks // keys)
    values_width = values * config.linear_value_head_dim
    channels = 2 * keys * copies * config.linear_key_head_dim + values_width
    each = split.leaving(block) * split.element * (channels + 2 * values + values_width)
    return Sent(each // split.ranks, each // split.ranks)


def delta_net_by_position(config: Any, block: range, split: Split) -> Sent:
    """What each rank's run does to the state, and its last columns, to all ranks."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * keys * key + values * value
    columns = channels * min(config.linear_conv_kernel_dim - 1, split.own(block))
    each = split.wide * values * key * (key + value) + split.element * columns
    return Sent((split.ranks - 1) * each, (split.ranks - 1) * each)


def _delta_net(config: Any, block: range, split: Split) -> Sent:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    by_head = can_share(keys, values, split.ranks)
    return (delta_net_by_head if by_head else delta_net_by_position)(config, block, split)


def experts(config: Any, block: range, split: Split) -> Sent:
    """Tokens to the owners of experts and back, if every owner is chosen equally often."""
    others, ranks = split.expert_ranks - 1, split.expert_ranks
    rows = split.own(block) * config.num_experts_per_tok
    there_and_back = 2 * rows * config.hidden_size * split.element
    counts = 8 * num_routed(config)
    return Sent((there_and_back + counts) * others // ranks, there_and_back * others // ranks)


def log_probs(block: range, split: Split) -> int:
    """Log-probs and entropies of a block, which every rank sees; once a block, no backward."""
    return split.leaving(block) * 2 * split.wide


def gathered_parameter_bytes(parameters: int, ranks: int, element: int = 2) -> int:
    """What FSDP sends from each rank to gather so many parameters once, over its shard group."""
    return parameters * element * (ranks - 1) // ranks


_FORMULAS: dict[str, dict[Purpose, LayerFormula]] = {
    "full_attention": {"attention": full_attention},
    "linear_attention": {"delta_rule": _delta_net},
    "dense": {"latent": dense_latent_attention},
    "full": {"selection": selection, "latent": sparse_latent_attention},
    "shared": {"latent": sparse_latent_attention},
}


def layer_bytes(config: Any, block: range, split: Split) -> list[dict[Purpose, Sent]]:
    """By layer and purpose, what a rank sends for a block.

    Args:
        config: Hugging Face configuration of a supported text model.
        block: absolute positions of its tokens, a multiple of the ranks.

    Raises:
        ValueError: the family is not supported, or the block is no multiple of the ranks.
    """
    found = []
    for kind, sparse in zip(layer_types_of(config), has_experts(config), strict=True):
        layer = {p: formula(config, block, split) for p, formula in _FORMULAS[kind].items()}
        if sparse and split.expert_ranks > 1:
            layer["experts"] = experts(config, block, split)
        found.append(layer)
    return found


def forward_bytes(
    config: Any, block: range, split: Split, *, again: bool = False
) -> Counter[Purpose]:
    """By purpose, what a rank sends in all layers' forward of a block; without the head's.

    Args:
        again: a recomputation under activation checkpointing, which sends nothing of what is kept.
    """
    total: Counter[Purpose] = Counter()
    for layer in layer_bytes(config, block, split):
        total.update({p: s.forward for p, s in layer.items() if not (again and s.kept)})
    return total


def backward_bytes(config: Any, block: range, split: Split) -> Counter[Purpose]:
    """The same of the backward, recomputation excluded."""
    total: Counter[Purpose] = Counter()
    for layer in layer_bytes(config, block, split):
        total.update({p: s.backward for p, s in layer.items() if s.backward})
    return total


def has_experts(config: Any) -> Sequence[bool]:
    """Which layers choose experts."""
    layers = range(config.num_hidden_layers)
    if not num_routed(config):
        return [False for _ in layers]
    if getattr(config, "mlp_layer_types", None):
        return [kind == "sparse" for kind in config.mlp_layer_types]
    dense_first = getattr(config, "first_k_dense_replace", 0)
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", [])
    return [i >= dense_first and i not in (dense or []) and (i + 1) % step == 0 for i in layers]
