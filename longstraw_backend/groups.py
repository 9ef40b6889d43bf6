"""Rows of a batch to groups that share a prompt.

Rows arrive in any order, groups may be partial, and a host's identifiers may be wrong: only equal
token ids make a group. An identifier spares hashing the prompt again, never decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Group", "Row", "group_rows", "prompt_digest"]


@dataclass(frozen=True)
class Row:
    """One response: ``index`` is its place in the batch, ``response`` its token ids, [R >= 0]."""

    index: int
    response: Tensor


@dataclass
class Group:
    """Rows whose prompts are the same token ids, [P] int64, P >= 1."""

    prompt: Tensor
    digest: bytes
    rows: list[Row] = field(default_factory=list)


def prompt_digest(prompt: Tensor) -> bytes:
    """128-bit digest of token ids; equal digests are taken for equal prompts."""
    data = prompt.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def group_rows(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], uids: Sequence[Hashable] | None = None
) -> list[Group]:
    """Group rows by prompt, groups and rows in order of first appearance.

    Args:
        prompts: token ids per row, [P_i] int64 each.
        responses: token ids per row, [R_i] int64 each; may be empty.
        uids: identifiers per row, a hint only: rows with one uid and different prompts are kept
            apart.

    Raises:
        ValueError: the lists differ in length, or a prompt is empty.
    """
    if len(prompts) != len(responses) or (uids is not None and len(uids) != len(prompts)):
        counts = len(prompts), len(responses), len(uids or ())
        raise ValueError(f"prompts, responses, uids: expected one of each per row, got {counts}")
    groups: dict[bytes, Group] = {}
    hinted: dict[Hashable, Group] = {}
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(
                f"prompts[{index}]: expected at least one token, got shape {tuple(prompt.shape)}"
            )
        group = hinted.get(uids[index]) if uids is not None else None
        if group is None or not torch.equal(group.prompt, prompt):
            digest = prompt_digest(prompt)
            group = groups.setdefault(digest, Group(prompt, digest))
            if uids is not None:
                hinted.setdefault(uids[index], group)
        group.rows.append(Row(index, response))
    return list(groups.values())
