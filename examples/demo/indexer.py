"""Trains the indexer of a sparse model on the attention that it is going to thin out.

The loss of a run gives an indexer no gradient. Its scores are trained here much as in the first
stage of DeepSeek-V3.2 (arXiv 2512.02556): towards the attention of the same model without indexer,
by the Kullback-Leibler divergence, all other weights fixed. Two things differ. The target is the
highest attention of any head and layer, not the sum over heads: one indexer serves both layers, and
what a single head needs must not be lost. And half of the loss is that of the tokens before an
answer's, which are few.

Legend: B rows, S tokens, D hidden size, H index heads, I index dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from curriculum import IGNORE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from longstraw_backend.models.mla import Rope, rotate

__all__ = ["index_scores", "train_indexer"]


def index_scores(attn: Any, hidden_BSD: Tensor, rope: Rope) -> Tensor:
    """Return the scores [B, S, S] of all pairs, of queries and keys, with gradient."""
    indexer = attn.indexer
    low = attn.q_a_layernorm(attn.q_a_proj(hidden_BSD))
    q_BSHI = _turned(indexer.wq_b(low).unflatten(-1, (indexer.n_heads, -1)), rope)
    k_BSI = _turned(indexer.k_norm(indexer.wk(hidden_BSD)), rope)
    weights_BSH = indexer.weights_proj(hidden_BSD) * indexer.n_heads**-0.5
    products = torch.einsum("bshi,bti->bsht", q_BSHI, k_BSI) * k_BSI.shape[-1] ** -0.5
    return torch.einsum("bsh,bsht->bst", weights_BSH, products.relu())


def _turned(x: Tensor, rope: Rope) -> Tensor:
    width = rope.cos.shape[-1]
    return torch.cat([rotate(x[..., :width], rope, interleaved=True), x[..., width:]], dim=-1)


def undriven(warm: nn.Module) -> PreTrainedModel:
    """Return the stock model with these weights, which shows its attention."""
    dense = AutoModelForCausalLM.from_config(warm.config, attn_implementation="eager")
    dense.load_state_dict(warm.state_dict())
    return dense


def dense_attention(model: PreTrainedModel, tokens_BS: Tensor) -> tuple[Tensor, Tensor, Rope]:
    """Return the highest attention [B, S, S], rows scaled to sum 1, with what the indexer sees: the
    first layer's input [B, S, D] and the angles."""
    with torch.no_grad():
        out = model(tokens_BS, output_attentions=True, output_hidden_states=True, use_cache=False)
        embedded = out.hidden_states[0]
        positions = torch.arange(tokens_BS.shape[1])[None]
        rope = Rope(*model.model.rotary_emb(embedded, positions))
        highest = torch.stack(out.attentions).amax((0, 2))
        attention = highest / highest.sum(-1, keepdim=True)
        return attention, model.model.layers[0].input_layernorm(embedded), rope


def divergence(scores_BSS: Tensor, attention_BSS: Tensor) -> Tensor:
    """Return KL(attention || softmax of the scores up to the query), [B, S]."""
    later = torch.ones_like(scores_BSS, dtype=torch.bool).triu(1)
    log_probs = scores_BSS.masked_fill(later, float("-inf")).log_softmax(-1).masked_fill(later, 0.0)
    return (torch.xlogy(attention_BSS, attention_BSS) - attention_BSS * log_probs).sum(-1)


def train_indexer(
    sparse: PreTrainedModel,
    warm: nn.Module,
    batches: Callable[[], tuple[Tensor, Tensor]],
    steps: int = 50,
    learning_rate: float = 1e-2,
) -> float:
    """Train the indexer of the first layer, in place; return the last loss.

    Args:
        sparse: the model of the run, whose other weights are those of `warm`.
        warm: the same without indexer.
        batches: draws tokens and labels, [B, S] each.
    """
    dense = undriven(warm)
    attn = sparse.model.layers[0].self_attn
    optimizer = torch.optim.Adam(attn.indexer.parameters(), lr=learning_rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - 0.9 * step / steps)
        tokens_BS, labels_BS = batches()
        attention, hidden, rope = dense_attention(dense, tokens_BS)
        each_BS = divergence(index_scores(attn, hidden, rope), attention)
        loss = each_BS.mean() + each_BS[:, :-1][labels_BS[:, 1:] != IGNORE].mean()
        loss.backward(inputs=list(attn.indexer.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
