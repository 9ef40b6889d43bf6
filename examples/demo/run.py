"""Trains a tiny model with DAPO on long prompts, in verl's own trainer, on a CPU.

    python examples/demo/run.py --family qwen3_5
    python examples/demo/run.py --strategy fsdp2 --steps 10 -- data.train_batch_size=2

Only `actor_rollout_ref.actor.strategy` differs between the strategies (and one variable by which
verl's own engine finds itself on a CPU). Words after `--` go to Hydra and win over everything here.
The questions and each family's first weights are kept beside the runs and used again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import model
import plot
import task
from families import FAMILIES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROUP = 8
PROMPTS_PER_STEP = 4
TRAIN_PROMPTS = 512
HELD_OUT_PROMPTS = 32
MAX_PROMPT_TOKENS = 3000
MAX_RESPONSE_TOKENS = 10
EXTRA_ENVIRONMENT = {
    "longstraw": {},
    # verl registers its own engine for CUDA and NPU only; under this name it runs on a CPU too.
    "fsdp2": {"VERL_ENGINE_DEVICE": "cuda"},
}
NEXT_STEPS = """For a real model, the same command of verl with these changed:
  actor_rollout_ref.model.path=Qwen/Qwen3-8B          your model
  data.train_files=... data.max_prompt_length=...     your prompts, the longest must fit
  reward.custom_reward_function.path=...              your reward
  +longstraw=grouped  instead of  +longstraw=cpu      and no VERL_PLATFORM=cpu
  trainer.n_gpus_per_node=8"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` is for Hydra."""
    words, overrides = argv, []
    if "--" in argv:
        words, overrides = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=sorted(EXTRA_ENVIRONMENT), default="longstraw")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="of the tiny model")
    parser.add_argument("--steps", type=int, help="default: as many as the family needs")
    parser.add_argument("--out", type=Path, help="default: runs/demo/FAMILY/STRATEGY")
    parser.add_argument("--data", type=Path, help="default: runs/demo/FAMILY/data")
    args = parser.parse_args(words)
    runs_well = FAMILIES[args.family].strategies
    if args.strategy not in runs_well:
        parser.error(f"--strategy: {args.family} needs {' or '.join(runs_well)} (families.py)")
    args.steps = args.steps or FAMILIES[args.family].steps
    folder = ROOT / "runs" / "demo" / args.family
    args.out = (args.out or folder / args.strategy).resolve()
    args.data = (args.data or folder / "data").resolve()
    args.overrides = overrides
    return args


def prepare(data: Path, family: str) -> None:
    """Make tokenizer, first weights and questions in `data`, or keep those of an earlier run."""
    tokenizer = model.prepare(data / "model", family)
    for name, count, seed in (("train", TRAIN_PROMPTS, 1), ("val", HELD_OUT_PROMPTS, 2)):
        path = data / f"{name}.parquet"
        if not path.exists():
            items = task.examples(
                tokenizer.encode, count, min_tokens=FAMILIES[family].prompt_tokens, seed=seed
            )
            task.write_parquet(items, path)


def overrides(strategy: str, family: str, steps: int, data: Path, out: Path) -> list[str]:
    """Return the Hydra overrides of the run: DAPO, the task, the model."""
    return [
        "+longstraw=cpu",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.rollout.name=longstraw",
        *dapo_overrides(FAMILIES[family].dapo_learning_rate),
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={MAX_RESPONSE_TOKENS}",
        f"actor_rollout_ref.model.path={data}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"reward.custom_reward_function.path={HERE}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_before_train=True",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=longstraw",
        f"trainer.experiment_name=demo_{family}_{strategy}",
        f"trainer.default_local_dir={out}/checkpoints",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={out}/hydra",
    ]


def dapo_overrides(learning_rate: float) -> list[str]:
    """Return what makes it DAPO: groups, clip-higher, token mean, dynamic sampling, no KL."""
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        "actor_rollout_ref.rollout.temperature=1.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "actor_rollout_ref.actor.use_kl_loss=False",
        f"actor_rollout_ref.actor.optim.lr={learning_rate}",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
    ]


def environment(strategy: str, metrics: Path) -> dict[str, str]:
    """Return the environment of the trainer: ours, the CPU platform, where the metrics go."""
    return {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **EXTRA_ENVIRONMENT[strategy],
    }


def show_new(metrics: Path, shown: int) -> int:
    """Print the steps that came since the last look; return how many have been shown."""
    rows = plot.read_rows(metrics)
    for index in range(shown, len(rows)):
        parts = [
            f"{name} {plot.curve(rows[index : index + 1], name)[1][0]:.3f}"
            for name in (*plot.REWARDS, "step")
            if plot.curve(rows[index : index + 1], name)[1]
        ]
        print(f"  step {rows[index][0]:3d}   {'   '.join(parts)}", flush=True)
    return len(rows)


def train(command: list[str], env: dict[str, str], metrics: Path, log: Path) -> int:
    """Run verl, its words into `log`, its steps onto the screen; return its exit code."""
    shown = 0
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                shown = show_new(metrics, shown)
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    show_new(metrics, shown)
    return process.returncode


def report(metrics: Path, png: Path) -> None:
    """Print the rewards at both ends, where the picture is, and how to go on."""
    rows = plot.read_rows(metrics)
    for name in plot.REWARDS:
        _, values = plot.curve(rows, name)
        if values:
            ends = max(1, min(5, len(values) // 2)) if name == plot.REWARDS[0] else 1
            first, last = sum(values[:ends]) / ends, sum(values[-ends:]) / ends
            print(f"reward, {name}: {first:.2f} -> {last:.2f}")
    print(f"picture: {png}\n\n{NEXT_STEPS}")


def main(argv: list[str]) -> int:
    """Prepare, train, draw, report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    metrics, log, png = (args.out / name for name in ("metrics.jsonl", "log.txt", "run.png"))
    metrics.unlink(missing_ok=True)
    prepare(args.data, args.family)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *overrides(args.strategy, args.family, args.steps, args.data, args.out),
        *args.overrides,
    ]
    print(f"verl's trainer starts, half a minute or so (log: {log})", flush=True)
    code = train(command, environment(args.strategy, metrics), metrics, log)
    if code != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), file=sys.stderr)
        print(f"the trainer ended with code {code}; the whole log: {log}", file=sys.stderr)
        return code
    tokens = FAMILIES[args.family].prompt_tokens
    title = (
        f"DAPO, {args.family}, strategy {args.strategy}, prompts of {tokens:,} tokens, 8 responses"
    )
    plot.draw(metrics, png, title)
    report(metrics, png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
