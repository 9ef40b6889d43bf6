"""The sampler keeps groups whole, in order, and loses no setting on the way."""

import pickle
from types import SimpleNamespace

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from longstraw_backend.workers.verl import failures
from longstraw_backend.workers.verl.sampler import (
    GroupedKVBatchMeta,
    GroupedReplayBuffer,
    buffer_arguments,
    group_rows,
)

FILTERING = {"enable": True, "metric": "acc", "max_inflight_gen_batches": 2}


class Trainer:
    """What the sampler may see of verl's trainer: its configuration and its workers."""

    def __init__(self, dp_size=1, filter_groups=None, refill=False):
        self.config = OmegaConf.create(
            {
                "algorithm": {"filter_groups": filter_groups or {"enable": False}},
                "trainer": {"v1": {"sampler": {"sync_refill_failed_groups": refill}}},
            }
        )
        mapping = list(range(dp_size))
        self.actor_rollout_wg = SimpleNamespace(_query_dispatch_info=lambda role: mapping)

    def refill(self, num_prompts):
        raise AssertionError("nothing to refill here")


def make_buffer(trainer=None, mode="sync", **sampler_kwargs):
    return GroupedReplayBuffer(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(sampler_kwargs),
        refill_fn=(trainer or Trainer()).refill,
    )


def queue(rows, prompts, partition="train"):
    """TransferQueue's listing: finished prompts and their rows, in the order given."""
    tags = {uid: {"is_prompt": True, "status": "finished", "global_steps": 1} for uid in prompts}
    tags |= {key: {"status": "success", "seq_len": tokens} for key, tokens in rows}
    return {partition: tags}


@pytest.fixture
def listing(monkeypatch):
    """Serve a listing in place of a running TransferQueue."""

    def serve(data):
        monkeypatch.setattr(tq, "kv_list", lambda *args: data)
        monkeypatch.setattr(tq, "kv_clear", lambda **kwargs: None)

    return serve


def test_rows_come_by_prompt_in_dataset_order_and_by_session(listing):
    finished = [("b_1_0", 9), ("a_0_0", 9), ("b_0_0", 9), ("a_10_0", 9), ("a_2_0", 9)]
    listing(queue(finished, prompts=["b", "a"]))
    batch, _ = make_buffer().sample(global_steps=1, partition_id="train", batch_size=2)
    assert batch.keys == ["b_0_0", "b_1_0", "a_0_0", "a_2_0", "a_10_0"]
    assert [tag["seq_len"] for tag in batch.tags] == [9] * 5


def test_order_survives_the_trainers_balancing(listing):
    listing(queue([("a_0_0", 1), ("b_0_0", 1)], prompts=["a", "b"]))
    batch, _ = make_buffer().sample(global_steps=1, partition_id="train", batch_size=2)
    assert isinstance(batch, GroupedKVBatchMeta)
    batch.reorder([1, 0])
    assert batch.keys == ["a_0_0", "b_0_0"]


def test_whole_groups_go_to_one_rank(listing):
    rows = [(f"{uid}_{s}_0", 10 * (i + 1)) for s in range(3) for i, uid in enumerate("abcd")]
    listing(queue(rows, prompts="abcd"))
    buffer = make_buffer(Trainer(dp_size=2))
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=4)
    halves = [{key[0] for key in batch.keys[:6]}, {key[0] for key in batch.keys[6:]}]
    assert halves[0].isdisjoint(halves[1])
    assert metrics["longstraw/sampler/token_imbalance"] == pytest.approx(1.0, abs=0.21)


def test_configured_dp_size_wins_over_the_trainers(listing):
    listing(queue([("a_0_0", 5), ("b_0_0", 5)], prompts="ab"))
    _, metrics = make_buffer(Trainer(dp_size=1), dp_size=2).sample(1, "train", 2)
    assert metrics == {"longstraw/sampler/token_imbalance": 1.0}


def test_batch_that_verl_will_pad_stays_grouped_in_one_piece(listing):
    listing(queue([("b_0_0", 5), ("a_0_0", 5), ("b_1_0", 5)], prompts="ab"))
    batch, _ = make_buffer(Trainer(dp_size=2)).sample(1, "train", 2)
    assert batch.keys == ["a_0_0", "b_0_0", "b_1_0"]


def test_validation_is_left_to_verl(listing):
    listing(queue([("b_0_0", 5), ("a_0_0", 5)], prompts="ab", partition="val"))
    batch, metrics = make_buffer(Trainer(dp_size=2)).sample(1, "val", 2)
    assert batch.keys == ["b_0_0", "a_0_0"]
    assert metrics == {}


def test_batch_crosses_processes():
    batch = GroupedKVBatchMeta(keys=["a"], tags=[{}])
    assert type(pickle.loads(pickle.dumps(batch))) is GroupedKVBatchMeta


def test_rows_of_unknown_prompts_come_last():
    groups = group_rows(["pad_0_0", "a_0_0"], [1, 2], uid_order=["a"])
    assert [group.rows for group in groups] == [(1,), (0,)]


def test_filtering_reaches_the_buffer():
    buffer = make_buffer(
        Trainer(filter_groups=FILTERING), filter_groups=FILTERING, train_batch_size=4
    )
    assert buffer.filter_groups_metric == "acc"
    assert buffer.max_inflight_gen_batches == 2
    assert buffer.gen_batch_size == 1
    assert buffer.train_batch_size == 4


def test_filtering_evicts_groups_without_signal(listing, monkeypatch):
    """verl's own filtering runs, fed by our arguments: group a has equal rewards, b does not."""
    rewards = {"a_0_0": 1.0, "a_1_0": 1.0, "b_0_0": 0.0, "b_1_0": 1.0}
    listing(queue([(key, 5) for key in rewards], prompts="ab"))
    monkeypatch.setattr(
        tq,
        "kv_batch_get",
        lambda keys, **kwargs: {
            "extra_fields": [{"reward_extra_info": {"acc": rewards[key]}} for key in keys]
        },
    )
    trainer = Trainer(filter_groups=FILTERING)
    trainer.refill = lambda num_prompts: None
    buffer = make_buffer(trainer, filter_groups=FILTERING, train_batch_size=1)
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert batch.keys == ["b_0_0", "b_1_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 1


def test_poll_interval_is_accepted():
    assert make_buffer(poll_interval=0.25).poll_interval == 0.25
    assert make_buffer().poll_interval == 2.0


def test_refilling_reaches_the_buffer():
    buffer = make_buffer(Trainer(refill=True), sync_refill_failed_groups=True)
    assert buffer.sync_refill_failed_groups
    assert buffer.gen_batch_size == 1


def test_filtering_that_did_not_arrive_is_an_error():
    with pytest.raises(ValueError, match=r"algorithm\.filter_groups is on.*would be ignored"):
        make_buffer(Trainer(filter_groups=FILTERING))


def test_refilling_that_did_not_arrive_is_an_error():
    with pytest.raises(ValueError, match="sync_refill_failed_groups is on"):
        make_buffer(Trainer(refill=True))


def test_filtering_needs_a_metric():
    with pytest.raises(ValueError, match="metric must be set"):
        buffer_arguments({"filter_groups": {"enable": True}, "train_batch_size": 4})


def test_filtering_needs_the_batch_size():
    with pytest.raises(ValueError, match="train_batch_size must be set"):
        buffer_arguments({"filter_groups": FILTERING})


def test_misspelt_argument_is_an_error():
    with pytest.raises(ValueError, match="poll_intervall"):
        make_buffer(poll_intervall=1)


def test_asynchronous_trainers_are_refused():
    with pytest.raises(ValueError, match="trainer_mode=sync"):
        make_buffer(mode="colocate_async")


def test_reported_failure_ends_the_run(listing):
    note = {"a_0": {"message": "data.max_prompt_length=8 must be larger"}}
    listing(queue([("a_0_0", 5)], prompts="a") | {failures.PARTITION: note})
    with pytest.raises(ValueError, match="data.max_prompt_length=8 must be larger"):
        make_buffer().sample(global_steps=1, partition_id="train", batch_size=1)


def test_is_a_drop_in_for_verls_buffer():
    assert issubclass(GroupedReplayBuffer, ReplayBuffer)
