"""Reinforcement learning of language models whose prompts run to millions of tokens.

The core knows torch and transformers only; adapters to RL frameworks live in ``workers``.
Read ``walk/group.py`` first: capture, score, replay of one group is the whole idea.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
