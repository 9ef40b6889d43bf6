"""The rollout's adapter and server around a fake engine."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from longstraw_backend.tiny import tiny_model
from longstraw_backend.walk.decode import Sample, Sampling
from longstraw_backend.workers.verl import rollout, rollout_server
from longstraw_backend.workers.verl.live import LIVE
from longstraw_backend.workers.verl.rollout import (
    GroupRequest,
    LongStrawServerAdapter,
    check_one_replica,
    check_options,
    generate_in_worker,
    limits_in_worker,
    stock_engine,
)
from longstraw_backend.workers.verl.rollout_requests import Limits
from longstraw_backend.workers.verl.rollout_server import LongStrawReplica, LongStrawServer


class Engine:
    """Answers with the prompt's first token and remembers how it was called."""

    def __init__(self, max_prompt_tokens=None):
        self.calls = []
        self.max_prompt_tokens = max_prompt_tokens

    def generate(self, prompt_ids, samplings, seed):
        self.calls.append((prompt_ids, samplings, seed))
        return [Sample([prompt_ids[0], i], [-1.0, -2.0], "stop") for i in range(len(samplings))]


def rollout_config(**values):
    given = dict(name="longstraw", tensor_model_parallel_size=1, prompt_length=64)
    return RolloutConfig(**(given | dict(response_length=8, n=2) | values))


@pytest.fixture
def live():
    before = dict(LIVE)
    LIVE.clear()
    yield LIVE
    LIVE.clear()
    LIVE.update(before)


@pytest.fixture
def adapter(live, task):
    def make(engine=None, **values):
        if engine is not None:
            live["actor"] = engine
        model = HFModelConfig(path=str(task.model), override_config={"attn_implementation": "sdpa"})
        return LongStrawServerAdapter(rollout_config(**values), model, device_mesh=None)

    return make


def request(prompt=(3, 4), samplings=2):
    return GroupRequest(np.array(prompt, dtype=np.int32), (Sampling(4),) * samplings)


def test_uses_the_engine_of_its_process(adapter):
    engine = Engine()
    made = adapter(engine)
    answer = made.generate_group(None, request())
    assert [sample.token_ids for sample in answer.samples] == [[3, 0], [3, 1]]
    [(prompt_ids, samplings, _)] = engine.calls
    assert prompt_ids == [3, 4] and samplings == [Sampling(4)] * 2


def test_calls_inside_the_worker_find_the_adapter(adapter):
    made = adapter(Engine())
    assert generate_in_worker(None, request()).samples[0].token_ids == [3, 0]
    assert limits_in_worker(None) is made.limits


def test_limits_come_from_config_and_model(adapter):
    limits = adapter(Engine(), max_model_len=100).limits
    assert limits == Limits(response_length=8, max_model_len=100, eos_token_ids=(1,))
    assert adapter(Engine(), ignore_eos=True).limits.eos_token_ids == ()


def test_weights_are_not_copied_but_their_version_is_kept(adapter):
    made = adapter(Engine())
    touched = []

    def weights():
        touched.append(1)
        yield "w", None

    asyncio.run(made.update_weights(weights(), global_steps=7))
    assert touched == []
    assert made.generate_group(None, request()).global_steps == 7


def seeds(adapter, version, prompts, seed=42):
    engine = Engine()
    made = adapter(engine, seed=seed)
    asyncio.run(made.update_weights(iter(()), global_steps=version))
    for prompt in prompts:
        made.generate_group(None, request(prompt))
    return [call[2] for call in engine.calls]


def test_seeds_repeat_after_a_resume_in_any_order_of_prompts(adapter):
    first = seeds(adapter, 5, [(1, 2), (3, 4)])
    assert sorted(seeds(adapter, 5, [(3, 4), (1, 2)])) == sorted(first)


def test_seeds_differ_between_versions_prompts_latecomers_and_runs(adapter):
    drawn = seeds(adapter, 5, [(1, 2), (1, 2), (3, 4)]) + seeds(adapter, 6, [(1, 2)])
    assert len({*drawn, *seeds(adapter, 5, [(1, 2)], seed=43)}) == 5
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_engine_learns_the_prompt_limit_unless_it_has_one(adapter):
    assert adapter(Engine()).config.prompt_length == LIVE["actor"].max_prompt_tokens == 64
    adapter(Engine(max_prompt_tokens=9))
    assert LIVE["actor"].max_prompt_tokens == 9


def test_only_the_first_rank_answers(adapter, monkeypatch):
    made = adapter(Engine())
    monkeypatch.setattr(rollout.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rollout.dist, "get_rank", lambda: 1)
    assert made.generate_group(None, request()) is None


def test_without_our_engine_the_stock_module_decodes(adapter):
    made = adapter()
    engine = SimpleNamespace(module=tiny_model("qwen3"), eval_mode=nullcontext)
    actor = SimpleNamespace(engine=engine)
    worker = SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(actor=actor)})
    answer = made.generate_group(worker, request())
    assert [len(sample.token_ids) for sample in answer.samples] == [4, 4]


def test_worker_without_an_actor_is_an_error():
    with pytest.raises(RuntimeError, match="no actor engine"):
        stock_engine(SimpleNamespace(worker_dict={}))


@pytest.mark.parametrize("layout", [dict(tensor_model_parallel_size=1), dict(data_parallel_size=2)])
def test_replica_that_does_not_span_all_ranks_is_refused(layout):
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        check_one_replica(rollout_config(**({"tensor_model_parallel_size": 2} | layout)), 2)


def test_ignored_options_are_refused():
    with pytest.raises(ValueError, match="do_sample"):
        check_options(rollout_config(do_sample=False))


class Worker:
    """A Ray handle that calls in this process; counts how many calls run at a time."""

    def __init__(self, fail=None):
        self.running = self.most = 0
        self.requests = []
        self.fail = fail
        self.__ray_call__ = SimpleNamespace(remote=self.call)

    async def call(self, function, request):
        self.running += 1
        self.most = max(self.most, self.running)
        self.requests.append(request)
        await asyncio.sleep(0.01)
        self.running -= 1
        if self.fail:
            raise self.fail
        samples = [Sample([int(request.prompt_ids[0]), i], [0.0, 0.0], "stop") for i in range(9)]
        return rollout.GroupAnswer(samples[: len(request.samplings)], 3)


@pytest.fixture
def serve(monkeypatch):
    """Send prompts to a server at once; returns the outputs in the order sent."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(rollout_server, "GATHER_SECONDS", 0.05)

    def run(workers, prompts, group_size=2, **options):
        async def go():
            server = LongStrawServer(workers, Limits(8, None, (1,)), group_size)
            calls = [
                server.generate(list(p), {"logprobs": True}, request_id=str(i), **options)
                for i, p in enumerate(prompts)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        return asyncio.run(go())

    return run


def test_siblings_are_answered_in_one_call(serve):
    worker = Worker()
    outputs = serve([worker], [(1, 9), (2, 9), (1, 9), (2, 9)])
    assert [len(r.samplings) for r in worker.requests] == [2, 2]
    assert [output.token_ids[0] for output in outputs] == [1, 2, 1, 2]
    assert outputs[0].token_ids != outputs[2].token_ids
    assert worker.most == 1  # one group at a time: decoding is a collective


def test_every_worker_gets_the_same_request_and_the_first_answers(serve):
    workers = [Worker(), Worker()]
    serve(workers, [(1,), (1,)])
    assert workers[0].requests[0] is workers[1].requests[0]


def test_lonely_request_is_answered_after_the_window(serve):
    [output] = serve([Worker()], [(1,)], group_size=4)
    assert output.token_ids == [1, 0]
    assert output.extra_fields["global_steps"] == 3
    assert output.log_probs == [0.0, 0.0]


def test_failure_reaches_every_member_and_not_the_next_group(serve):
    worker = Worker(fail=RuntimeError("out of memory"))
    outputs = serve([worker], [(1,), (1,), (2,), (2,)])
    assert [str(output) for output in outputs] == ["out of memory"] * 4
    assert len(worker.requests) == 2


def test_images_are_refused(serve):
    [output] = serve([Worker()], [(1,)], image_data=["picture"])
    assert isinstance(output, ValueError) and "images" in str(output)


def test_separate_rollouts_are_refused(task):
    replica = LongStrawReplica(0, rollout_config(), model_config=None, gpus_per_node=1)
    replica.rollout_mode = RolloutMode.STANDALONE
    with pytest.raises(ValueError, match="hybrid mode only"):
        asyncio.run(replica.launch_servers())


def test_asynchronous_trainers_are_told():
    server = LongStrawServer([], Limits(8, None, ()), 1)
    with pytest.raises(NotImplementedError, match="trainer_mode=sync"):
        asyncio.run(server.abort_all_requests())
