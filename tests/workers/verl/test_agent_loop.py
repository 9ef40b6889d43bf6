"""One tokenisation per prompt, and no prompt is cut."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from longstraw_backend.workers.verl import agent_loop
from longstraw_backend.workers.verl.agent_loop import LongStrawAgentLoop
from longstraw_backend.workers.verl.failures import PARTITION

ANSWER = TokenOutput(token_ids=[7, 8, 9], log_probs=[-1.0, -2.0, -3.0], stop_reason="completed")


class Server:
    """Answers at once and remembers the prompts."""

    def __init__(self):
        self.prompts = []

    async def generate(self, prompt_ids, **kwargs):
        self.prompts.append(prompt_ids)
        return ANSWER.model_copy(deep=True)


@pytest.fixture
def make_loop(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model)

    def make(server, prompt_length=64, response_length=2, tokenizer=tokenizer):
        rollout = {"prompt_length": prompt_length, "response_length": response_length}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        return LongStrawAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
        )

    return make


@pytest.fixture
def notes(monkeypatch):
    """What is reported to the trainer."""
    put = []

    async def keep(key, partition_id, tag):
        put.append((key, partition_id, tag["message"]))

    monkeypatch.setattr(tq, "async_kv_put", keep)
    return put


@pytest.fixture
def tokenisations(monkeypatch):
    """How often verl's builder tokenises a prompt."""
    calls = []
    base = agent_loop.SingleTurnAgentLoop.ct_build_initial_tokens

    async def counted(self, messages, *args, **kwargs):
        calls.append(messages)
        return await base(self, messages, *args, **kwargs)

    monkeypatch.setattr(agent_loop.SingleTurnAgentLoop, "ct_build_initial_tokens", counted)
    return calls


def prompt(text, uid="u", session=0):
    return {
        "raw_prompt": [{"role": "user", "content": text}],
        "uid": uid,
        "session_id": session,
        "global_steps": 1,
    }


def respond(make_loop, server, text="hello", **options):
    """One response, from a loop made where it runs: verl's loops bind to the event loop."""

    async def run():
        return await make_loop(server, **options).run({}, **prompt(text, uid=uuid4().hex))

    return asyncio.run(run())


def test_is_registered_under_the_name_of_the_overlay():
    assert _agent_loop_registry["longstraw_single_turn_agent"]["_target_"].endswith(
        "agent_loop.LongStrawAgentLoop"
    )


def test_responses_of_a_prompt_share_one_tokenisation(make_loop, tokenisations):
    server = Server()

    async def group():
        loops = [make_loop(server) for _ in range(4)]
        return await asyncio.gather(
            *[loop.run({}, **prompt("hello", session=i)) for i, loop in enumerate(loops)]
        )

    outputs = asyncio.run(group())
    assert len(tokenisations) == 1
    assert len({tuple(ids) for ids in server.prompts}) == 1
    assert [output.response_ids for output in outputs] == [[7, 8]] * 4
    assert outputs[0].prompt_ids == server.prompts[0]
    assert outputs[0].response_logprobs == [-1.0, -2.0]


def test_prompts_do_not_share(make_loop, tokenisations):
    server = Server()

    async def two():
        loops = make_loop(server), make_loop(server)
        await asyncio.gather(
            loops[0].run({}, **prompt("hello", uid="a")), loops[1].run({}, **prompt("bye", uid="b"))
        )

    asyncio.run(two())
    assert len(tokenisations) == 2
    assert len({tuple(ids) for ids in server.prompts}) == 2


def test_tokens_are_forgotten_with_the_last_response(make_loop):
    respond(make_loop, Server())
    assert len(agent_loop._IN_USE) == 0


@pytest.mark.parametrize("over", [0, 1, 5])
def test_prompt_at_or_over_the_limit_is_refused_and_reported(make_loop, notes, over):
    server = Server()
    respond(make_loop, server)
    tokens = len(server.prompts[0])
    limit = tokens - over
    with pytest.raises(ValueError, match=rf"data\.max_prompt_length={limit}.*{tokens} tokens"):
        respond(make_loop, Server(), prompt_length=limit)
    [(key, partition, message)] = notes
    assert key.endswith("_0") and partition == PARTITION
    assert f"at least {tokens + 1}" in message


def test_prompt_just_under_the_limit_is_kept_whole(make_loop, notes):
    server = Server()
    respond(make_loop, server)
    tokens = len(server.prompts[0])
    respond(make_loop, server, prompt_length=tokens + 1)
    assert server.prompts[1] == server.prompts[0]
    assert notes == []


def test_refusal_by_the_server_is_reported(make_loop, notes):
    async def refuse(**kwargs):
        raise ValueError("sampling option min_p=0.1 is not supported")

    with pytest.raises(ValueError):
        respond(make_loop, SimpleNamespace(generate=refuse))
    assert "min_p" in notes[0][2]


def test_passing_fault_is_left_to_verl(make_loop, notes):
    async def fail(**kwargs):
        raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError):
        respond(make_loop, SimpleNamespace(generate=fail))
    assert notes == []


def test_unusable_tokenizer_is_reported(make_loop, notes, task):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.convert_tokens_to_ids = lambda token: None
    tokenizer.get_vocab = lambda: {}
    with pytest.raises(ValueError):
        respond(make_loop, Server(), tokenizer=tokenizer)
    assert len(notes) == 1
