"""Decoding with a stock strategy's module, so that strategies can be compared on one rollout.

Plain `transformers`: prefill once, copy the cache for the samples, one token of each per step. It
holds the whole prompt's attention in one forward and serves small comparisons on a CPU, nothing
more; the LongStraw engine has its own decoding.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache

from longstraw_backend.kernels.sampling import sample_tokens
from longstraw_backend.walk.decode import Sample, Sampling, add_tokens

__all__ = ["generate_with_stock_module"]


@torch.no_grad()
def generate_with_stock_module(
    module: nn.Module, prompt_ids: list[int], samplings: Sequence[Sampling], seed: int
) -> list[Sample]:
    """One sample per sampling, all of the same prompt.

    Under FSDP every forward is a collective: the number of steps depends only on the arguments and
    the weights, so ranks called alike stay in step.

    Args:
        module: a causal language model in eval mode, possibly wrapped by FSDP2.
        prompt_ids: at least one token.
        samplings: at least one.
        seed: of the random numbers.
    """
    if not prompt_ids or not samplings:
        raise ValueError(
            f"prompt_ids and samplings must not be empty, got {len(prompt_ids)} tokens and "
            f"{len(samplings)} samplings"
        )
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    cache = DynamicCache(config=module.config)
    prompt_1P = torch.tensor([prompt_ids], device=device)
    output = module(input_ids=prompt_1P, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(samplings))
    logits_BV = output.logits[:, -1].expand(len(samplings), -1)
    samples = [Sample() for _ in samplings]
    position = len(prompt_ids)
    while True:
        tokens_B, log_probs_B = sample_tokens(logits_BV, samplings, generator)
        add_tokens(samples, tokens_B, log_probs_B, samplings)
        if all(sample.stop_reason for sample in samples):
            return samples
        output = module(
            input_ids=tokens_B[:, None],
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.full_like(tokens_B, position)[:, None],
        )
        position += 1
        logits_BV = output.logits[:, -1]
