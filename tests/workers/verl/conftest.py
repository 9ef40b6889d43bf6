"""What the verl tests share: a tiny model with its task, and verl's command line in a subprocess.

Trainer runs are subprocesses with a Ray of their own (`address=local`, a temporary directory of
their own), so that they neither join nor disturb another Ray on the machine.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from longstraw_backend.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]
HAVE_VERL = importlib.util.find_spec("verl") is not None

if HAVE_VERL:
    if not torch.cuda.is_available():
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    import longstraw_backend.workers.verl.plugin  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]

TRAINER = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, END = "<|pad|>", "<|im_end|>"  # the latter is what verl's Qwen3 tokenisation ends a turn with
SPECIALS = [PAD, END, "<|im_start|>"]
VOCABULARY = 311
REWARD = '''
GOOD = set("abcdefghijklm")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Share of characters from the first half of the alphabet: easy to learn, never constant."""
    return sum(c in GOOD for c in solution_str) / max(1, len(solution_str))
'''


@dataclass(frozen=True)
class Task:
    """Paths of a tiny model, its data and its reward."""

    model: Path
    train: Path
    long_prompt: Path
    reward: Path


@dataclass(frozen=True)
class Run:
    """A finished process of the trainer."""

    returncode: int
    log: str
    metrics: dict[int, dict[str, float]]

    def series(self, name: str) -> list[float]:
        """A metric over the steps."""
        return [self.metrics[step][name] for step in sorted(self.metrics)]


def plugin_metadata(directory: Path) -> list[str]:
    """Where the entry point is found: nowhere extra when the project is installed."""
    if any(point.name == "longstraw" for point in metadata.entry_points(group="verl.plugins")):
        return []
    info = directory / "longstraw_backend-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: longstraw-backend\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[verl.plugins]\nlongstraw = longstraw_backend.workers.verl.plugin\n"
    )
    return [str(directory)]


@pytest.fixture(scope="session")
def verl_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process in which verl finds this checkout and runs on the CPU."""
    paths = [str(ROOT), *plugin_metadata(tmp_path_factory.mktemp("metadata"))]
    inherited = os.environ.get("PYTHONPATH", "")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def train_tokenizer(directory: Path) -> None:
    """A byte-level BPE whose size is the model's vocabulary: no id is unknown to either."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the note of harbor says that every question about the castle has one answer here"
    tokenizer.train_from_iterator([words] * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    assert len(fast) == VOCABULARY
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def save_model(directory: Path) -> None:
    """Two random layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=SPECIALS.index(END),
        pad_token_id=SPECIALS.index(PAD),
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def write_prompts(path: Path, contents: list[str]) -> None:
    """Prompts with the columns that verl's RLHFDataset reads."""
    import pandas as pd

    pd.DataFrame(
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": content}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, content in enumerate(contents)
    ).to_parquet(path)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A tiny Qwen3, prompts of 20 to 60 tokens, and a reward it can learn in a few steps."""
    root = tmp_path_factory.mktemp("task")
    save_model(root / "model")
    train_tokenizer(root / "model")
    (root / "reward.py").write_text(REWARD)
    short = [f"question {i} about the castle " + "here " * (i % 9) for i in range(64)]
    write_prompts(root / "train.parquet", short)
    write_prompts(root / "long.parquet", [*short[:7], "castle " * 200, *short[7:15]])
    return Task(root / "model", root / "train.parquet", root / "long.parquet", root / "reward.py")


@pytest.fixture(scope="session")
def mixture(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with the tokenizer of the task."""
    path = tmp_path_factory.mktemp("mixture")
    special = {"eos_token_id": SPECIALS.index(END), "pad_token_id": SPECIALS.index(PAD)}
    tiny_model("qwen3_moe", vocab_size=VOCABULARY, **special).save_pretrained(path)
    for file in task.model.glob("*token*"):
        shutil.copy(file, path)
    shutil.copy(task.model / "chat_template.jinja", path)
    return path


def short_run(task: Task, world_size: int) -> list[str]:
    """Overrides common to the trainer runs: 4 prompts x 4 responses of 12 tokens a step."""
    return [
        "+longstraw=cpu",
        f"trainer.n_gpus_per_node={world_size}",
        f"data.train_files={task.train}",
        f"data.val_files={task.train}",
        "data.train_batch_size=4",
        "data.max_prompt_length=128",
        "data.max_response_length=12",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={task.model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=3e-2",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={task.reward}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.val_before_train=False",
        "trainer.logger=[console,file]",
    ]


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """verl's JSON lines by step; empty when the run ended before the first."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def run_to_end(
    command: list[str], env: dict[str, str], cwd: Path, seconds: float, kill_after: int | None
) -> tuple[int, str]:
    """Run in a session of its own; past the time limit end it whole and return -SIGKILL.

    Args:
        kill_after: a step; once it is done one of the trainer's workers is killed.
    """
    log, until = cwd / "log.txt", time.monotonic() + seconds
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
            if kill_after is not None and kill_after in read_metrics(cwd / "metrics.jsonl"):
                workers_of(cwd)[-1].kill()
                kill_after = None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, log.read_text(errors="replace")


def workers_of(cwd: Path) -> list[psutil.Process]:
    """The processes that train in the run whose metrics go to this folder."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())
            mine = str(cwd / "metrics.jsonl") in process.environ().values()
            if mine and name.startswith("ray::WorkerDict"):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


@pytest.fixture
def train(verl_env: dict[str, str], task: Task, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run verl's trainer on the tiny task: `train("name", overrides, world_size=1)`."""
    ray_dirs: list[str] = []

    def run(
        name: str,
        overrides: list[str],
        *,
        world_size: int = 1,
        seconds: float = 300,
        extra_env: dict[str, str] | None = None,
        kill_a_worker_after: int | None = None,
    ) -> Run:
        cwd = tmp_path / name
        cwd.mkdir()
        ray_dirs.append(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # socket paths must be short
        env = verl_env | {"VERL_FILE_LOGGER_PATH": str(cwd / "metrics.jsonl")}
        env |= extra_env or {}
        ray = [
            "+ray_kwargs.ray_init.address=local",
            f"+ray_kwargs.ray_init._temp_dir={ray_dirs[-1]}",
        ]
        command = [*TRAINER, *short_run(task, world_size), *ray, *overrides]
        code, log = run_to_end(command, env, cwd, seconds, kill_a_worker_after)
        return Run(code, log, read_metrics(cwd / "metrics.jsonl"))

    yield run
    for directory in ray_dirs:
        shutil.rmtree(directory, ignore_errors=True)
