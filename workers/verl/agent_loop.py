"""Single-turn agent loop that tokenises a prompt once and refuses to cut it.

verl runs one agent loop per response. Each would tokenise the prompt again (seconds per response
at a million tokens), so the loops of one prompt share the tokens here. And where verl cuts a long
prompt from the left with only a warning (`rollout.prompt_length`, which follows
`data.max_prompt_length`), this loop raises: a prompt without its beginning is another task.

A prompt of exactly that length is refused as well, since nothing downstream can tell it from one
that was cut. Chosen by `rollout.agent.default_agent_loop=longstraw_single_turn_agent`.
"""

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from longstraw_backend.workers.verl.failures import report_failure

__all__ = ["LongStrawAgentLoop"]


class _Tokenised:
    """One prompt being tokenised, or already so; lives while a loop of that prompt holds it."""

    def __init__(self, task: "asyncio.Task[list[int]]") -> None:
        self.task = task


_IN_USE: WeakValueDictionary[str, _Tokenised] = WeakValueDictionary()


def check_prompt_fits(num_tokens: int, max_prompt_length: int) -> None:
    """Refuse a prompt that verl would cut, or that looks as if it had been.

    Raises:
        ValueError: the prompt is as long as the limit or longer.
    """
    if num_tokens >= max_prompt_length:
        raise ValueError(
            f"data.max_prompt_length={max_prompt_length} must be larger than every prompt, got a "
            f"prompt of {num_tokens} tokens, whose beginning verl would cut off silently; set "
            f"data.max_prompt_length to at least {num_tokens + 1}, or drop long prompts from the "
            "dataset"
        )


@register("longstraw_single_turn_agent")
class LongStrawAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn loop with shared prompt tokens and no silent truncation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tokenised: _Tokenised | None = None
        self._unusable: ValueError | None = None
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:  # e.g. a tokenizer that lacks the model family's tokens
            self._unusable = error

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> AgentLoopOutput:
        """One response; a request that can never be served is reported to the trainer."""
        self._uid = kwargs.get("uid")
        try:
            if self._unusable is not None:
                raise self._unusable
            return await super().run(sampling_params, priority=priority, **kwargs)
        except ValueError as error:
            await report_failure(f"{self._uid}_{kwargs.get('session_id', 0)}", error)
            raise
        finally:
            self._tokenised = None

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> list[int]:
        """verl's tokenisation, done once for all loops of this prompt that are running."""
        build = super().ct_build_initial_tokens
        has_media = any(kwargs.get(name) for name in ("images", "videos", "audios"))
        if self._uid is None or has_media:  # media features come back through an out-parameter
            return await build(messages, *args, **kwargs)
        shared = _IN_USE.get(self._uid)
        if shared is None:
            shared = _Tokenised(asyncio.ensure_future(build(messages, *args, **kwargs)))
            _IN_USE[self._uid] = shared
        self._tokenised = shared
        return await asyncio.shield(shared.task)

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        check_prompt_fits(len(prompt_ids), self.rollout_config.prompt_length)
        return prompt_ids
