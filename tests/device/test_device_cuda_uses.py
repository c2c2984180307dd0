"""Every use of CUDA's interface in the source stands in one list, with its reason: a new one is looked at first."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WINGS = ("rlctl", "workers", "backends")
ARGUMENTS = {"pin_memory", "non_blocking"}
LITERAL = '"cuda"'  # a device, or a question whether one is

# Files, what they use, and why. Names of `torch.cuda` stand without it.
USES: tuple[tuple[str, str, str], ...] = (
    (
        "rlctl/check/dry_run.py rlctl/loop/weight_transport.py rlctl/memory/memory_plan.py "
        "rlctl/memory/plan_command.py rlctl/memory/role_models.py rlctl/models/as_built_check.py "
        "rlctl/preflight/expected.py rlctl/processes/role_configs.py rlctl/run/serve_command.py "
        "workers/transports/__init__.py",
        LITERAL,
        "the word that says where a role computes; the driver asks no GPU",
    ),
    ("workers/rank_report.py", "is_initialized", "each rank says which GPU it has, if one"),
    ("backends/train/role_group.py", f"{LITERAL} device_count set_device", "each rank takes its GPU before all else"),
    ("backends/zero/deepspeed_start.py", f"{LITERAL} device_count", "DeepSpeed takes the rank's GPU by LOCAL_RANK"),
    (
        "backends/megatron/megatron_start.py backends/megatron/packed_stage.py backends/megatron/cpu_shim.py "
        "backends/megatron/megatron_model.py",
        f"{LITERAL} current_device is_available torch.cuda",
        "Megatron knows GPUs alone: where there is none, its calls are answered for the CPU",
    ),
    ("backends/fsdp2/sharding.py", f"{LITERAL} pin_memory", "parameters on the host are pinned where they go to a GPU"),
    ("backends/hf/attention_choice.py", f"{LITERAL} get_device_capability is_available", "what the GPU's kernels can"),
    (
        "backends/packed/layout.py backends/train/lm_head.py",
        LITERAL,
        "where a GPU's kernels want another shape",
    ),
    (
        "backends/packed/packed_attention.py",
        "enable_cudnn_sdp",
        "cuDNN keeps a plan for each length, and is switched off",
    ),
    ("backends/packed/state_layers.py backends/train/liger.py", LITERAL, "proofs leave the GPU's generator as it was"),
    ("backends/train/rng.py", f"{LITERAL} get_rng_state is_available set_rng_state", "a checkpoint has the generator"),
    ("backends/packed/staging.py", "non_blocking pin_memory", "to the device alone, from pinned chunks used once"),
    (
        "backends/train/offload.py",
        "is_available is_cuda non_blocking pin_memory synchronize",
        "both ways, and nothing goes on before all is there",
    ),
    (
        "backends/train/activation_offload.py backends/weights/host_pieces.py",
        f"{LITERAL} Event Stream current_stream is_cuda non_blocking pin_memory stream",
        "copies on a stream of their own: who waits is shown in test_device_streams.py",
    ),
    (
        "backends/weights/device_memory.py backends/weights/joined_group.py",
        f"{LITERAL} current_device get_device_properties ipc_collect set_device synchronize",
        "windows on this rank's GPU: what was written is there before anyone is told",
    ),
    (
        "backends/torch_rollout/decode_graphs.py",
        "CUDAGraph graph graph_pool_handle",
        "decode steps; a real GPU alone has graphs, and test_protocol_on_device.py compares them",
    ),
    (
        "backends/memory.py backends/vllm_rollout/worker.py",
        f"{LITERAL} empty_cache max_memory_reserved memory_reserved",
        "how much is held, and to hand it back",
    ),
)


def uses(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or names_cuda(node.value)):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            found.add(LITERAL)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and names_cuda(node.value):
            found.add("torch.cuda")
    return found


def names_cuda(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "cuda"


@cache
def used() -> dict[str, set[str]]:
    files = sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    found = {
        name: uses(ast.parse(text))
        for name, text in texts.items()
        if any(word in text for word in ("cuda", *ARGUMENTS))
    }
    return {name: names for name, names in found.items() if names}


def test_every_use_has_its_reason() -> None:
    allowed = {file: set(names.split()) for files, names, _ in USES for file in files.split()}
    new = {file: names - allowed.get(file, set()) for file, names in used().items()}
    assert not {file: names for file, names in new.items() if names}, "say why, in USES"


def test_nothing_is_listed_that_is_gone() -> None:
    found = used()
    for files, names, reason in USES:
        assert set().union(*(found.get(file, set()) for file in files.split())) == set(names.split()), reason
        assert all(file in found for file in files.split()), reason


def test_a_use_is_found_in_any_form() -> None:
    code = "torch.cuda.Stream(); x.to('cuda:1', non_blocking=True); torch.empty(1, pin_memory=True); c = torch.cuda"
    assert uses(ast.parse(code)) == {"Stream", LITERAL, "non_blocking", "pin_memory", "torch.cuda"}
