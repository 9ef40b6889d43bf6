"""verl's own trainer, end to end on a CPU: it learns, reports, saves, resumes, stops in time."""

import signal

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

STEPS = 10
LONGSTRAW = "actor_rollout_ref.actor.longstraw"
# Timing apart, a resumed run repeats the uninterrupted one, on one rank to the last bit. On several
# the responses of a group may change places, and sums with them.
SAME = dict(rel=1e-4, abs=1e-5)
COMPARED = ["critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"]


def check_learning(run, data_ranks):
    assert run.returncode == 0, run.log[-4000:]
    assert sorted(run.metrics) == list(range(1, STEPS + 1))
    rewards = run.series("critic/score/mean")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    # One capture serves the decoding, scoring and replay of a prompt's four responses; all ranks
    # decode every prompt, and those that share prompts train on their part of the batch.
    for step in run.metrics.values():
        captured = step["actor/longstraw/prompt_tokens_captured"]
        assert captured * 7 / data_ranks < step["actor/longstraw/prompt_tokens_full_sequence"]


def check_alike(run, expected, steps, ended=True):
    if ended:
        assert run.returncode == 0, run.log[-4000:]
        assert sorted(run.metrics) == steps
    for step in steps:
        for name in COMPARED:
            assert run.metrics[step][name] == pytest.approx(expected.metrics[step][name], **SAME), (
                step,
                name,
            )


def resume_from(checkpoint):
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


@pytest.mark.parametrize(
    ("choice", "world_size", "context"),
    [("actor_rollout_ref.actor.strategy=longstraw", 1, 1), ("model_engine=longstraw", 2, 2)],
    ids=["stock_config-1_rank", "model_engine-2_ranks"],
)
def test_learns_and_resumes(train, tmp_path, choice, world_size, context):
    """Ranks that have shared each prompt resume with a part of the batch each."""
    checkpoints = tmp_path / "checkpoints"
    shared = [choice, f"trainer.default_local_dir={checkpoints}"]
    sharing = [f"{LONGSTRAW}.context_parallel_size={context}"] if context > 1 else []
    whole = train(
        "whole",
        [*shared, *sharing, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"],
        world_size=world_size,
    )
    check_learning(whole, world_size // context)
    resumed = train(
        "resumed",
        [*shared, "trainer.total_training_steps=4", *resume_from(checkpoints / "global_step_2")],
        world_size=world_size,
    )
    check_alike(resumed, whole, [3, 4])


def test_ranks_share_prompts_and_experts(train, mixture, tmp_path):
    """Four ranks, and two of which one is killed, do what one rank does; so does one rank that goes
    on where the two have ended."""
    checkpoints = tmp_path / "checkpoints"
    shared = ["model_engine=longstraw", f"actor_rollout_ref.model.path={mixture}"]

    def run(name, steps, *options, **how):
        return train(name, [*shared, f"trainer.total_training_steps={steps}", *options], **how)

    one = run("one", 4)
    assert sorted(one.metrics) == [1, 2, 3, 4], one.log[-4000:]
    sizes = [f"{LONGSTRAW}.context_parallel_size=2", f"{LONGSTRAW}.expert_parallel_size=4"]
    four = run("four", 2, *sizes, world_size=4)
    check_alike(four, one, [1, 2])
    saving = [f"trainer.default_local_dir={checkpoints}", "trainer.save_freq=2"]
    two = run("two", 9, sizes[0], *saving, world_size=2, kill_a_worker_after=2)
    assert two.returncode not in (0, -signal.SIGKILL), two.log[-4000:]
    check_alike(two, one, [1, 2], ended=False)
    resumed = run("resumed", 4, *resume_from(checkpoints / "global_step_2"))
    check_alike(resumed, one, [3, 4])


def test_prompt_that_verl_would_cut_ends_the_run(train, task):
    """The long prompt comes in the second step; the run must neither train on it nor hang."""
    run = train(
        "long",
        [
            "model_engine=longstraw",
            f"data.train_files={task.long_prompt}",
            "trainer.total_training_steps=3",
        ],
    )
    assert run.returncode == 1, run.log[-4000:]
    assert sorted(run.metrics) == [1]
    assert "ValueError: the rollout refused" in run.log
    assert "data.max_prompt_length=128 must be larger than every prompt" in run.log


def test_exact_training_is_that_of_the_stock_strategy(train, tmp_path):
    """Swapping backends changes nothing but cost: losses, gradient norms and weights after three
    steps. verl registers its own engines for CUDA alone; the variable lets them run here."""

    def run(name, *choice, **env):
        shared = [
            f"trainer.default_local_dir={tmp_path / name}",
            "trainer.total_training_steps=3",
            "trainer.save_freq=3",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
            "actor_rollout_ref.actor.optim.lr=1e-3",
        ]
        done = train(f"{name}_run", [*shared, *choice], extra_env=env)
        assert done.returncode == 0, done.log[-4000:]
        assert sorted(done.metrics) == [1, 2, 3]
        saved = tmp_path / name / "global_step_3" / "actor" / "huggingface"
        return done, load_file(saved / "model.safetensors")

    stock, expected = run(
        "stock", "actor_rollout_ref.actor.strategy=fsdp2", VERL_ENGINE_DEVICE="cuda"
    )
    exact, found = run(
        "exact", "model_engine=longstraw", "actor_rollout_ref.actor.longstraw.gradient=exact"
    )
    # One module decodes and scores: the probabilities agree to rounding.
    assert max(stock.series("training/rollout_probs_diff_max")) < 1e-5
    for name in COMPARED:
        assert exact.series(name) == pytest.approx(stock.series(name), rel=1e-4, abs=1e-6), name
    apart = sum((found[n] - w).square().sum() for n, w in expected.items())
    assert (apart / sum(w.square().sum() for w in expected.values())).sqrt() < 1e-5
