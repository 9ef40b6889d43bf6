"""verl's own trainer, end to end on a CPU: it learns, reports, saves and resumes."""

import pytest

pytestmark = pytest.mark.slow

STEPS = 10
# Timing apart, a resumed run repeats the uninterrupted one; sums over ranks and threads may differ
# in the last bits, and Adam's first steps amplify that.
SAME = dict(rel=1e-3, abs=1e-4)
COMPARED = ["critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"]


def check_learning(run, *, steps=STEPS):
    assert run.returncode == 0, run.log[-4000:]
    assert sorted(run.metrics) == list(range(1, steps + 1))
    ours = [name for name in run.metrics[1] if "longstraw/" in name]
    assert "longstraw/prompt_tokens_captured" in " ".join(ours), sorted(run.metrics[1])
    rewards = run.series("critic/score/mean")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def check_resumed(resumed, whole):
    assert resumed.returncode == 0, resumed.log[-4000:]
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        for name in COMPARED:
            assert resumed.metrics[step][name] == pytest.approx(
                whole.metrics[step][name], **SAME
            ), (step, name)


@pytest.mark.parametrize(
    ("choice", "world_size"),
    [("actor_rollout_ref.actor.strategy=longstraw", 1), ("model_engine=longstraw", 2)],
    ids=["stock_config-1_rank", "model_engine-2_ranks"],
)
def test_learns_and_resumes(train, tmp_path, choice, world_size):
    checkpoints = tmp_path / "checkpoints"
    shared = [choice, f"trainer.default_local_dir={checkpoints}"]
    whole = train(
        "whole",
        [*shared, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"],
        world_size=world_size,
    )
    check_learning(whole)
    resumed = train(
        "resumed",
        [
            *shared,
            "trainer.total_training_steps=4",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={checkpoints}/global_step_2",
        ],
        world_size=world_size,
    )
    check_resumed(resumed, whole)
