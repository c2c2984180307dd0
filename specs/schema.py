"""The run spec: one frozen pydantic model per section of the TOML.

Every field carries the sentence that the reference (`docs/spec.md`) prints. Unknown keys are refused at
every depth. Rules that span several keys live in `specs/rules.py`; reading files in `specs/load.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WrapValidator,
    field_validator,
)

from specs import foreign_engines
from specs.attention import Attention
from specs.plain_values import plain, usable_path

SCHEMA_VERSION = 1

RoleName = Literal["actor", "ref", "reward", "rollout"]
DType = Literal["fp32", "bf16"]
RoadKind = Literal["shm", "folder", "group", "cuda_ipc"]
# Nats by which a step of learning may move the mean log-prob of the sampled tokens before it is said, or stops the run.
LEARNED_A_STEP_WARN, LEARNED_A_STEP_STOP = 0.5, 1.0
# What a sync sends: the model's own weights with adapters added in; both apart; the adapters alone.
WeightForm = Literal["merged", "apart", "adapters"]
OWN_ATTENTION = ("vllm", "sglang")  # rollout engines that choose their attention themselves
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[str, AfterValidator(usable_path)]
NonEmptyPath = Annotated[NonEmpty, AfterValidator(usable_path)]


class Table(BaseModel):
    """A TOML table: frozen, and without room for a mistyped key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    _plain = field_validator("*")(plain)


# ── what is run ───────────────────────────────────────────────────────────────────────────────────


class RunSection(Table):
    """What the run is called, how long it lasts and how long anything may take."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(usable_path)] = (
        Field(description="Name of the run; also the name of its directory under `dir`.")
    )
    steps: int = Field(gt=0, description="Steps to train. A step is generate, score, learn, once.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything random in the run.")
    dir: NonEmptyPath = Field(
        "runs", description="Folder that holds run directories; relative to where `rlctl` is called."
    )
    colocate: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether trainers and rollouts take turns on their devices (offload and sleep between phases). "
        "`auto`: when they name the same GPU. `always` also works on CPU, where it saves host memory.",
    )
    max_memory_growth_GiB: float = Field(
        4.0,
        gt=0,
        description="How much more than at first a role may hold after it has left a shared device, if it grows "
        "steadily, step by step; then the run stops.",
    )
    start_timeout_s: float = Field(300.0, gt=0, description="Seconds a role may take to start and build its model.")
    verb_timeout_s: float = Field(1800.0, gt=0, description="Seconds any single request to a role may take.")
    heartbeat_timeout_s: float = Field(
        30.0, ge=1.0, description="Seconds without a sign of life after which a rank counts as hung and the run ends."
    )


class ModelSection(Table):
    """The model that every role uses unless its own section says otherwise."""

    path: NonEmptyPath = Field(
        description="Folder (relative to the spec file), hub id, or one of the tiny random models that ship with "
        "rlctl: `builtin:tiny-digits`, `builtin:tiny-bytes`."
    )
    attn_implementation: Attention = Field(
        "auto",
        description="Attention of every role. `auto` is the best that works: flash_attention_2 on a GPU that has the "
        "package, else sdpa, else eager. Anything else is used as asked or refused; a `kernels-community` name is code "
        "that transformers downloads from the hub.",
    )
    from_scratch: bool = Field(
        False,
        description="Start from random weights drawn from `run.seed`; only `config.json` and the tokenizer are read.",
    )
    trust_remote_code: bool = Field(False, description="Allow Python code that lies in the model folder to run.")


class DataSection(Table):
    """Where prompts come from and how they become tokens."""

    train: NonEmptyPath = Field(
        description="`*.jsonl` or `*.parquet`, relative to the spec file; or a hub dataset id, with `:config` where it "
        "has several (`openai/gsm8k:main`); or `builtin:sort-digits`."
    )
    split: NonEmpty = Field("train", description="Split to read; only for a hub dataset id.")
    prompt_column: NonEmpty = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    answer_column: NonEmpty = Field("answer", description="Column that the built-in rewards compare with.")
    template: str = Field(
        "",
        description="Text of the prompt with `{column}` for the row's columns; empty takes `prompt_column` as it is.",
    )
    chat: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the model's chat template wraps the prompt. `auto`: where the tokenizer has a template.",
    )
    system: str = Field("", description="System message put first; only with a chat template.")
    prompts_per_step: int = Field(gt=0, description="Prompts drawn for a step; each is answered `group_size` times.")
    max_prompt_tokens: int = Field(gt=0, description="Longest prompt, in tokens.")
    max_response_tokens: int = Field(gt=0, description="Longest answer, in tokens.")
    overlong: Literal["drop", "refuse"] = Field(
        "drop", description="A prompt over `max_prompt_tokens`: `drop` and count it, or `refuse` to start."
    )
    bad_rows: Literal["drop", "refuse"] = Field(
        "refuse", description="A row that does not parse or lacks a column: `drop` and count it, or `refuse` to start."
    )
    shuffle: bool = Field(True, description="Draw rows in a new random order each epoch (from `run.seed`).")
    max_rows: int | None = Field(None, gt=0, description="Read only that many rows.")


# ── rewards ───────────────────────────────────────────────────────────────────────────────────────


class RewardTerm(Table):
    """What all reward terms share."""

    weight: float = Field(1.0, description="Factor of this term in the weighted sum.")


class ExactMatch(RewardTerm):
    """1 when the answer, stripped, equals the row's answer; else 0."""

    kind: Literal["exact_match"]
    partial: bool = Field(False, description="Give the share of character positions that are right instead of 0 or 1.")
    ignore_case: bool = Field(False, description="Compare without regard to case.")


class MathVerify(RewardTerm):
    """1 when `math-verify` finds the answer mathematically equal to the row's answer."""

    kind: Literal["math_verify"]


class Regex(RewardTerm):
    """1 when the pattern is found in the answer; else 0."""

    kind: Literal["regex"]
    pattern: NonEmpty = Field(description="Python regular expression, searched in the answer (dot matches newlines).")


class Overlong(RewardTerm):
    """0 up to `limit - buffer` tokens, then falls linearly to -1 at the limit (DAPO, Yu et al. 2025, eq. 13)."""

    kind: Literal["overlong"]
    buffer_tokens: int = Field(gt=0, description="Length of the slope before `max_response_tokens`.")


class Function(RewardTerm):
    """A Python function `score(prompt, completion, row) -> float`."""

    kind: Literal["function"]
    path: Annotated[PathText, StringConstraints(pattern=r"^.+\.py:[A-Za-z_]\w*$")] = Field(
        description="`file.py:name`, relative to the spec file."
    )


RewardTermTable = Annotated[ExactMatch | MathVerify | Regex | Overlong | Function, Field(discriminator="kind")]


# ── algorithm ─────────────────────────────────────────────────────────────────────────────────────


class Grpo(Table):
    """Group-relative policy optimisation (Shao et al. 2024), with the choices of DAPO and Dr.GRPO."""

    kind: Literal["grpo"]
    group_size: int = Field(ge=1, description="Answers to each prompt.")
    scale: Literal["std", "none"] = Field(
        "std", description="Divide advantages by the group's standard deviation, or not (Dr.GRPO, Liu et al. 2025)."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Probability ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Probability ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss where the advantage is negative (3.0 is usual); unset: none."
    )
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"] = Field(
        "token-mean", description="How token losses become one number, over the whole mini-batch of all ranks."
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(actor ‖ ref) in the loss. 0: no reference is loaded.")
    kl_estimator: Literal["k2", "k3", "k3-straight-through"] = Field(
        "k3",
        description="Estimator of the KL (Schulman 2020). k1 is absent: as a loss its gradient is zero in expectation. "
        "`k3-straight-through` has the value of k3 and the gradient of k2.",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    mini_batches_per_step: int = Field(
        1, ge=1, description="Optimizer steps that one pass over the step's samples makes."
    )
    epochs_per_step: int = Field(1, ge=1, description="Passes over the step's samples.")

    @property
    def on_policy(self) -> bool:
        """One update per step: the sampled tokens' old log-probs are the current ones."""
        return self.mini_batches_per_step == 1 and self.epochs_per_step == 1


AlgorithmTable = Grpo  # a discriminated union by `kind` as soon as there is a second one


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


class DdpEngine(Table):
    """Every rank holds the whole model; gradients are summed once per optimizer step."""

    kind: Literal["ddp"] = "ddp"
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )


class Fsdp2Engine(Table):
    """PyTorch's FSDP2: each group of `shard` ranks holds the model once, cut in rows; groups are replicas."""

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = Field(
        None, gt=0, description="Ranks that hold the model together; unset: all processes of the role."
    )
    replicate: int = Field(
        1, gt=0, description="Groups that each hold the whole model; shard × replicate is the role's processes."
    )
    reshard_after_forward: bool = Field(
        True,
        description="Let go of a layer's gathered parameters after its forward pass and gather them again for the "
        "backward pass; false is quicker and holds the whole model in compute precision.",
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="`cpu`: parameters, gradients and optimizer live in host memory and visit the GPU layer by layer.",
    )
    sync_every_micro_batch: bool = Field(
        False,
        description="Reduce gradients after every micro-batch: less memory (no whole gradient is kept), more traffic.",
    )
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )


class ZeroEngine(Table):
    """DeepSpeed ZeRO: optimizer state (1), gradients too (2), parameters too (3) are cut across the ranks."""

    kind: Literal["zero", "zero3"] = "zero"
    stage: Literal[1, 2, 3] = Field(3, description="What is cut across ranks. `zero3` is `zero` with stage 3.")
    offload_optimizer: bool = Field(False, description="Keep optimizer state in host memory and step there.")
    offload_parameters: bool = Field(False, description="Keep parameters in host memory; stage 3 only.")
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description="More keys for DeepSpeed's configuration (`rlctl train --dry-run` shows all of it). A key that the "
        "spec decides elsewhere is refused.",
    )


class FakeTrainEngine(Table):
    """A numpy bigram language model with exact gradients: tests the whole frame in milliseconds, without torch."""

    kind: Literal["fake"] = "fake"


class TorchRolloutEngine(Table):
    """The embedded sampler: continuous batching over a preallocated KV cache, on CPU or GPU."""

    kind: Literal["torch"] = "torch"
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time (slots of the KV cache).")
    prefill_tokens: int = Field(8192, gt=0, description="Most prompt tokens that go through the model at once.")


class VllmEngine(Table):
    """vLLM in the role's own process: for models and batches where its kernels pay, usually on GPUs."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(1, gt=0, description="GPUs that hold the model together.")
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the GPU's memory that vLLM takes for weights, activations and KV cache. A GPU of its own "
        "can give 0.9; shared with a trainer, what the trainer leaves during a sync.",
    )
    kv_cache_GiB: float | None = Field(
        None,
        gt=0,
        description="Size of the KV cache; unset: 1 on the CPU, on a GPU what `gpu_memory_utilization` leaves.",
    )
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time.")
    prefix_caching: bool = Field(True, description="Compute the prompt of a group once for all of its answers.")
    lora: Literal["merged", "adapters"] = Field(
        "merged",
        description="What a sync sends of an actor that trains adapters: the whole model with them `merged` in, "
        "or the model once and then the `adapters` alone, which vLLM applies itself.",
    )
    enforce_eager: bool | None = Field(
        None,
        description="Run the model without compiling it and without CUDA graphs; unset: only on the CPU, where "
        "compiling takes longer than it saves.",
    )


class SglangEngine(Table):
    """An SGLang server per replica, as a child of the role's process, spoken to over HTTP. Needs GPUs."""

    kind: Literal["sglang"] = "sglang"
    tensor_parallel: int = Field(1, gt=0, description="GPUs that hold the model together.")
    memory_fraction: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights and KV cache together. A GPU of its own can give 0.85; "
        "shared with a trainer, what the trainer leaves during a sync.",
    )
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time.")
    prefix_caching: bool = Field(True, description="Compute the prompt of a group once for all of its answers.")
    deterministic: bool = Field(
        True,
        description="SGLang's deterministic inference: a sample depends on `run.seed` and its number alone. Without it "
        "sampling is faster, and SGLang takes no seed of a sample.",
    )
    weights_backup: bool = Field(
        False,
        description="Let the weights survive a sleep in host memory. A run does without: a sync follows every sleep.",
    )
    weights_dir: PathText = Field(
        "",
        description="Folder that a sync passes the weights through, whole, as safetensors; the server must see it, and "
        "it is emptied after each sync. Empty: shared memory (`/dev/shm`).",
    )


class FakeRolloutEngine(Table):
    """Samples from the fake trainer's bigram model."""

    kind: Literal["fake"] = "fake"


# Kinds that are none of these may be another package's (`specs/foreign_engines.py`).
TrainEngineTable = Annotated[
    DdpEngine | Fsdp2Engine | ZeroEngine | FakeTrainEngine,
    Field(discriminator="kind"),
    WrapValidator(foreign_engines.or_foreign("train")),
    PlainSerializer(foreign_engines.dump),
]
RolloutEngineTable = Annotated[
    TorchRolloutEngine | VllmEngine | SglangEngine | FakeRolloutEngine,
    Field(discriminator="kind"),
    WrapValidator(foreign_engines.or_foreign("rollout")),
    PlainSerializer(foreign_engines.dump),
]


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────


class RoleSection(Table):
    """What every role's section holds: where it runs and with what."""

    launcher: Literal["python", "torchrun", "deepspeed", "srun"] = Field(
        "python",
        description="How the role's processes are started. Several ranks of one model want `torchrun`, `deepspeed`, or "
        "inside a SLURM job `srun`.",
    )
    processes: int = Field(1, ge=1, le=4096, description="Processes of this role, on all its nodes together.")
    nodes: int = Field(1, ge=1, le=512, description="Hosts that share the processes evenly.")
    devices: tuple[int, ...] = Field((), description="GPU numbers on each node, one per process there; empty: CPU.")
    python: PathText = Field(
        "", description="Interpreter of this role, relative to the spec file; empty: the one that runs rlctl."
    )
    env: dict[str, str] = Field({}, description="Extra environment variables of this role.")
    threads: int | None = Field(None, gt=0, description="CPU threads per process; unset: shared out by the plan.")


class ModelRole(RoleSection):
    """A role that holds a language model."""

    dtype: DType = Field("fp32", description="Precision of the forward pass. bf16 trains with fp32 master weights.")
    attn_implementation: Attention | None = Field(
        None, description="This role's attention; unset: `model.attn_implementation`."
    )
    micro_batch_tokens: int = Field(
        8192, gt=0, description="Most tokens in one forward pass. A hard limit: no sequence may be longer."
    )


class Optimizer(Table):
    """AdamW (Loshchilov & Hutter 2019) and its schedule, counted in optimizer steps."""

    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; on matrices only.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, as a share of `lr`.")
    max_grad_norm: float = Field(1.0, ge=0, description="Global gradient norm is clipped to this; 0: never.")


class Lora(Table):
    """Low-rank adapters (Hu et al. 2021): only they learn, the model's own weights stay."""

    rank: int = Field(16, gt=0, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    targets: tuple[NonEmpty, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="Names of the linear layers that get one (`q_proj`, …); `all-linear`: every one but the head.",
    )


class ActorSection(ModelRole):
    """The model that learns."""

    engine: TrainEngineTable = Field(DdpEngine(), description="How the actor is held.")
    lora: Lora | None = Field(None, description="Train low-rank adapters instead of the whole model.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    optimizer: Optimizer = Field(Optimizer(), description="Optimizer and schedule.")


class RefSection(ModelRole):
    """The frozen model that the KL term compares with. Exists only when `algorithm.kl_coef` is above 0."""

    model: PathText = Field("", description="Another model's path; empty: the actor's own starting weights.")
    engine: TrainEngineTable = Field(DdpEngine(), description="How the reference is held.")


class RolloutSection(RoleSection):
    """The model that writes answers. It always holds the actor's weights."""

    engine: RolloutEngineTable = Field(TorchRolloutEngine(), description="What samples.")
    dtype: DType | None = Field(None, description="Precision; unset: the actor's.")
    attn_implementation: Attention | None = Field(
        None, description="This role's attention; unset: `model.attn_implementation`."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides by the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the smallest set with this much probability.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens; 0: all.")
    stop: tuple[NonEmpty, ...] = Field(
        (), description="Texts that each encode to one token and end an answer, besides the model's own end tokens."
    )
    max_probe_gap: float | None = Field(
        None,
        gt=0,
        description="Largest log-prob difference the behaviour probe allows; unset: 2e-3 in fp32, 0.15 in bf16.",
    )
    warn_logprob_gap: float | None = Field(
        None,
        gt=0,
        description="Mean log-prob difference between sampler and trainer on a step's sampled tokens above which the "
        "run warns; unset: 1e-4 in fp32, 0.03 in bf16, more with `top_p` and `max_staleness`, none with `top_k`.",
    )
    max_logprob_gap: float | None = Field(
        None,
        gt=0,
        description="The same, above which the run stops before it learns from the step and keeps the batch; unset: "
        "1e-2 in fp32, 0.3 in bf16, more with `top_p` and `max_staleness`, none with `top_k`.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="Steps that sampling may run ahead of learning; 0: each waits for the other. Else samples are "
        "drawn while the actor learns, with weights up to so many steps old; older ones are dropped and counted.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="How often replicas that crashed or hang are started again before the run fails, in all and per "
        "attempt; 0: never.",
    )


class RewardSection(RoleSection):
    """What judges the answers, in isolated processes. The role also holds the tokenizer and the data."""

    terms: tuple[RewardTermTable, ...] = Field(min_length=1, description="Terms of the weighted sum.")
    workers: int = Field(2, ge=1, le=256, description="Isolated processes that run the terms.")
    timeout_s: float = Field(10.0, gt=0, description="Seconds one answer may take to judge.")
    fallback: float = Field(0.0, description="Score of an answer whose judging raised, hung or crashed.")


# ── around the run ────────────────────────────────────────────────────────────────────────────────


class EvalSection(Table):
    """Greedy evaluation on held-out prompts."""

    every: int = Field(
        gt=0, description="Steps between evaluations; one runs before the first step and after the last."
    )
    data: PathText = Field(
        "", description="Where the prompts come from; empty: the last `prompts` rows of `data.train` are held out."
    )
    split: NonEmpty = Field("test", description="Split to read; only for a hub dataset id.")
    prompts: int = Field(64, gt=0, description="Prompts to evaluate on.")
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")] = Field(
        "heldout", description="Name in the metrics: `eval/<name>/reward_mean`."
    )


class CheckpointSection(Table):
    """When the run's state is saved, and how much is kept."""

    every: int = Field(50, gt=0, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(2, gt=0, description="Newest checkpoints kept.")


class SyncSection(Table):
    """How weights travel from actor to rollout. Every sync is verified; that cannot be switched off."""

    bucket_MiB: float = Field(
        16.0,
        gt=0,
        description="Most that travels at once, in two buckets by turns; a larger weight travels alone. Not for the "
        "road `shm`, which has a small ring of its own.",
    )
    road: Literal["auto", "shm", "folder", "group", "cuda_ipc"] = Field(
        "auto",
        description="`shm`: shared memory of one host. `folder`: safetensors files in a folder that both reach. "
        "`group`: a process group (NCCL between GPUs, else gloo). `cuda_ipc`: memory of the one GPU that actor and "
        "rollout share. `auto`: from where they are.",
    )
    folder: PathText = Field(
        "", description="Folder of the road `folder`, relative to the spec file; empty: `sync` in the run directory."
    )


class ClusterSection(Table):
    """The hosts of a run on several nodes. The first one is where `rlctl train` runs."""

    hostfile: PathText = Field(
        "", description="File with a line `host slots=N` per node (DeepSpeed's format), relative to the spec file."
    )
    remote_shell: tuple[NonEmpty, ...] = Field(
        ("ssh", "-o", "BatchMode=yes", "{host}"),
        description="Command that runs a shell on another host, for the launchers torchrun and deepspeed; `{host}` is "
        "the host's name.",
    )
    address: str = Field(
        "", description="Address of this host that the other nodes can reach; empty: found from the first of them."
    )
    port: int = Field(29400, gt=1023, lt=65536, description="Port where the ranks of a group first meet.")


class TrackingSection(Table):
    """Where metrics go besides `metrics.jsonl`."""

    kind: Literal["tensorboard", "wandb"] = Field(
        description="`tensorboard` writes to the run directory; `wandb` logs to a project."
    )
    project: str = Field("", description="Project name; only for wandb.")


class Spec(Table):
    """The whole run spec."""

    schema_: Literal[1] = Field(alias="schema", description="Version of this format; always 1.")
    run: RunSection
    model: ModelSection
    data: DataSection
    reward: RewardSection
    algorithm: AlgorithmTable
    actor: ActorSection = ActorSection()
    ref: RefSection | None = None
    rollout: RolloutSection = RolloutSection()
    eval: EvalSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    sync: SyncSection = SyncSection()
    cluster: ClusterSection | None = None
    tracking: TrackingSection | None = None

    # Derived values: what the sections mean together. Nothing here rewrites the spec.

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.data.max_response_tokens

    @property
    def optimizer_steps(self) -> int:
        return self.run.steps * self.algorithm.mini_batches_per_step * self.algorithm.epochs_per_step

    @property
    def ratio_against(self) -> Literal["sampler", "current", "trainer"]:
        """Whose log-probs the loss divides by: the sampler's own where it may run ahead, so that the clipped ratio
        corrects what the actor has learned since; else the trainer's before the update, which are the current ones
        when there is but one."""
        if self.rollout.max_staleness:
            return "sampler"
        return "current" if self.algorithm.on_policy else "trainer"

    @property
    def needs_ref(self) -> bool:
        """Whether the loss compares the actor with a reference."""
        return self.algorithm.kl_coef > 0

    @property
    def ref_is_actor(self) -> bool:
        """Whether the actor itself, without its adapters, is the reference."""
        own_model = self.ref is not None and self.ref.model
        return self.needs_ref and self.actor.lora is not None and not own_model

    @property
    def rollout_applies_adapters(self) -> bool:
        """Whether the sampler holds the actor's adapters beside the model, instead of merged into it."""
        return self.actor.lora is not None and getattr(self.rollout.engine, "lora", "merged") == "adapters"

    @property
    def ref_section(self) -> RefSection | None:
        """The section of the role `ref` when there is one: the spec's own, or one shaped like the actor."""
        if not self.needs_ref or self.ref_is_actor:
            return None
        if self.ref is not None:
            return self.ref
        actor = self.actor
        shared = {name: getattr(actor, name) for name in ModelRole.model_fields}
        return RefSection(engine=actor.engine, **shared)

    @property
    def rollout_dtype(self) -> DType:
        return self.rollout.dtype or self.actor.dtype

    @property
    def probe_gap(self) -> float:
        if self.rollout.max_probe_gap is not None:
            return self.rollout.max_probe_gap
        return 2e-3 if self.rollout_dtype == self.actor.dtype == "fp32" else 0.15

    @property
    def logprob_gaps(self) -> tuple[float | None, float | None]:
        """Mean gaps between sampler and trainer above which to warn and to stop; None: never.

        With `top_p` the sampler's log-probs are those of a set with at least that much probability, so that they lie up
        to -ln(top_p) above the trainer's. `top_k` has no such bound. Where sampling runs ahead, the gap also holds what
        the actor has learned since.
        """
        rollout = self.rollout
        warn_at, limit = rollout.warn_logprob_gap, rollout.max_logprob_gap
        if rollout.top_k == 0:
            cut = -math.log(rollout.top_p)
            exact = self.rollout_dtype == self.actor.dtype == "fp32"
            warn_at = warn_at or cut + (1e-4 if exact else 0.03) + LEARNED_A_STEP_WARN * rollout.max_staleness
            limit = limit or cut + (1e-2 if exact else 0.3) + LEARNED_A_STEP_STOP * rollout.max_staleness
        return warn_at, limit

    def attention(self, role: RoleName) -> Attention:
        """Attention asked for a role: its own key, else the model's; none where the engine chooses it."""
        section = self.role(role)
        if role == "rollout" and self.rollout.engine.kind in OWN_ATTENTION:
            return "auto"
        own = getattr(section, "attn_implementation", None)
        return own or self.model.attn_implementation

    def model_path(self, role: RoleName) -> str:
        """Path of the model that a role builds."""
        ref = self.ref_section
        return ref.model if role == "ref" and ref is not None and ref.model else self.model.path

    def role(self, role: RoleName) -> RoleSection:
        section = self.ref_section if role == "ref" else getattr(self, role)
        assert isinstance(section, RoleSection), f"{role} is not part of this run"
        return section

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """Roles of this run, in the order in which they are started."""
        names: tuple[RoleName, ...] = ("reward", "rollout", "actor")
        return (*names, "ref") if self.ref_section is not None else names

    def resolved(self) -> dict[str, Any]:
        """Every key with its effective value, as written to `resolved.json`."""
        return self.model_dump(mode="json", by_alias=True)
