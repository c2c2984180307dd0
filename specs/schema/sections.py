"""The sections of a run spec that belong to no role: what is run, and what happens around it."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from specs.attention import Attention
from specs.builtin_tasks import GYM_PREFIX, PREFIX
from specs.schema.table import NonEmpty, NonEmptyPath, PathText, Table, usable_path

DATA_SUFFIXES = (".jsonl", ".parquet")

# ── what is run ───────────────────────────────────────────────────────────────────────────────────


class RunSection(Table):
    """The name of the run, how long it lasts and how long anything may take."""

    name: Annotated[str, StringConstraints(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(usable_path)]
    """Name of the run; also the name of its directory under `dir`."""
    recipe: Literal["rl", "sft", "preference", "reward_model"] = "rl"
    """Decides what the run does, and so which other sections there are: reinforcement learning; supervised fine-tuning;
    learning preferences; or training a reward model."""
    steps: int = Field(gt=0)
    """Steps to train. A step of `rl` is generate, score, learn, once; of the other recipes an optimizer step."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of everything random in the run."""
    dir: NonEmptyPath = "runs"
    """Folder that holds run directories; relative to where `rlctl` is called."""
    colocate: Literal["auto", "always", "never"] = "auto"
    """Whether trainers and rollouts take turns on their devices (offload and sleep between phases). `auto`: when
    they name the same GPU. `always` also works on CPU, where it saves host memory."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds a host may take to answer its check, and a role to start and build its model."""
    verb_timeout_s: float = Field(1800.0, gt=0)
    """Seconds any single request to a role may take."""
    stall_timeout_s: float = Field(600.0, gt=0)
    """Seconds without any progress (no token, grade, micro-batch, weight or answer of any rank) after which the
    stuck ranks are named and their stacks logged; a rollout is started again, any other role ends the run. What is
    slow but moves continues."""
    heartbeat_timeout_s: float = Field(30.0, ge=1.0)
    """Seconds without a sign of life after which a rank counts as hung and the run ends."""

    @property
    def place(self) -> Path:
        """The run directory, where none is named beside the spec."""
        return Path(self.dir).expanduser() / self.name


class ModelSection(Table):
    """The model that every role uses unless its own section says otherwise."""

    path: NonEmptyPath
    """Folder (relative to the spec file), hub id, one of the tiny random models that ship with rlctl
    (`builtin:tiny-digits`, `builtin:mini-digits`, `builtin:tiny-bytes`, and with a chat template `builtin:tiny-chat`),
    or a run, whose newest checkpoint is taken: `runs/warm`, or `runs/warm@120`."""
    attn_implementation: Attention = "auto"
    """Attention of every role. `auto` is the best that works: flash_attention_2 on a GPU that has the package, else
    sdpa, else eager. Anything else is used as asked or refused; a `kernels-community` name is code that
    transformers downloads from the hub."""
    from_scratch: bool = False
    """Start from random weights drawn from `run.seed`; only `config.json` and the tokenizer are read."""
    trust_remote_code: bool = False
    """Allow Python code that lies in the model folder to run."""


class DataSection(Table):
    """Where prompts come from and how they become tokens."""

    train: NonEmptyPath
    """`*.jsonl` or `*.parquet`, relative to the spec file; or a hub dataset id, with `:config` where it has several
    (`openai/gsm8k:main`); or `builtin:sort-digits`, `builtin:products` or `builtin:guesses`; or a data set of
    the package reasoning-gym, with its options (`reasoning-gym:chain_sum?size=2000&seed=7&max_terms=4`)."""
    split: NonEmpty = "train"
    """Split to read; only for a hub dataset id."""
    prompt_column: NonEmpty = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_column: NonEmpty = "answer"
    """Column that the built-in rewards compare with, and with which `check-config` tries functions."""
    template: str = ""
    """Text of the prompt with `{column}` for the row's columns; empty takes `prompt_column` as it is."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether the model's chat template wraps the prompt. `auto`: where the tokenizer has a template."""
    system: str = ""
    """System message put first; only with a chat template."""
    prompts_per_step: int = Field(gt=0)
    """Prompts drawn for a step; each is completed `group_size` times."""
    max_prompt_tokens: int = Field(gt=0)
    """Longest prompt, in tokens."""
    max_response_tokens: int = Field(gt=0)
    """Longest completion, in tokens."""
    overlong: Literal["drop", "refuse"] = "drop"
    """A prompt over `max_prompt_tokens`: `drop` and count it, or `refuse` to start."""
    bad_rows: Literal["drop", "refuse"] = "refuse"
    """A row that does not parse or lacks a column: `drop` and count it, or `refuse` to start."""
    shuffle: bool = True
    """Draw rows in a new random order each epoch (from `run.seed`)."""
    max_rows: int | None = Field(None, gt=0)
    """Read only that many rows."""
    tools_column: NonEmpty = "tools"
    """Column with the tools that the chat template shows the model, where rows have it and no environment is there."""
    environment_column: str = ""
    """Column that names the row's environment, where the spec has several."""

    @property
    def named(self) -> dict[str, str]:
        """Key → source of what is trained on."""
        return {"data.train": self.train}


def is_hub_data(source: str) -> bool:
    """Whether a data source is a hub id rather than a file or a task that is made by rule."""
    is_file = PurePath(source).suffix in (*DATA_SUFFIXES, ".json", ".csv", ".txt")
    return bool(source) and not is_file and not source.startswith((PREFIX, GYM_PREFIX, ".", "/", "~"))


def same_source(one: str, other: str) -> bool:
    """Whether two keys name the same file, folder or hub id, as far as their text tells."""
    return bool(one) and os.path.normpath(one) == os.path.normpath(other)


# ── around the run ────────────────────────────────────────────────────────────────────────────────


class CheckpointSection(Table):
    """When the run's state is saved, and how much is kept."""

    every: int = Field(50, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, gt=0)
    """Newest checkpoints kept."""


class SyncSection(Table):
    """How weights travel from actor to rollout. Every sync is verified; that cannot be switched off."""

    bucket_MiB: float = Field(16.0, gt=0)
    """Most that travels at once, in two buckets by turns; a larger weight travels alone. Not for the transport
    `shm`, which has a small ring of its own."""
    transport: Literal["auto", "shm", "folder", "group", "cuda_ipc"] = "auto"
    """`shm`: shared memory of one host. `folder`: safetensors files in a folder that both reach. `group`: a process
    group (NCCL between GPUs, else gloo). `cuda_ipc`: memory of the one GPU that actor and rollout share. `auto`:
    from where they are."""
    folder: PathText = ""
    """Folder of the transport `folder`, relative to the spec file; empty: `sync` in the run directory."""
    delta: bool = False
    """Whether the transport `folder` sends only what changed since the last sync: a few percent of the bytes at the
    learning rates of RL, with `rollout.dtype` bf16. Both ends keep a copy of the weights in host memory for it."""


class ClusterSection(Table):
    """The hosts of a run on several nodes. The first one is where `rlctl train` runs."""

    kind: Literal["local", "ray", "slurm"] = "local"
    """Where the other nodes come from: none (`local`), a Ray cluster, or the SLURM job that rlctl runs in."""
    address: NonEmpty = "auto"
    """Address of the Ray cluster (`host:port` of its head); `auto`: the one that this machine is a node of."""
    port: int = Field(29400, gt=1023, lt=65536)
    """Port where the ranks of a group first meet."""
