"""One rank of the tests of attention over rows that ranks share; started by torchrun with four ranks.

Each case is a tiny model. A packed row is computed in slices by 2 and by 4 ranks, and compared with the model's own
forward pass of one sequence at a time: hidden states, and gradients of all parameters, summed over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from families import FAMILIES, VOCAB  # noqa: E402
from plain_kernel import put_plain_kernel  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch import distributed as dist  # noqa: E402
from train_helpers import make_batch, model_config, train_config, whole_row, write_model  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from backends import activity  # noqa: E402
from backends.ddp.engine import DdpTrainEngine  # noqa: E402
from backends.hf.hf_model import build_model  # noqa: E402
from backends.hf.recompute import recompute_activations  # noqa: E402
from backends.packed.packed_input import can_share_prompts, packed_row  # noqa: E402
from backends.packed.staging import Staging  # noqa: E402
from backends.protocol import Rank  # noqa: E402
from backends.train.lora import Adapters  # noqa: E402
from backends.train.role_group import join_group  # noqa: E402
from backends.ulysses import split_attention  # noqa: E402
from backends.ulysses.exchange import heads_to_rows, rows_to_heads  # noqa: E402
from backends.ulysses.sequence_group import SequenceGroup, sequence_group  # noqa: E402
from backends.ulysses.shared_batch import share_batch, sum_of_ranks  # noqa: E402
from backends.ulysses.split_attention import sharing  # noqa: E402
from specs.errors import ModelError  # noqa: E402
from specs.schema.role_section import Lora  # noqa: E402

LENGTHS = (7, 1, 12, 3, 5, 3)  # 31: no degree divides it
PARENTS = (-1, -1, -1, -1, 3, 3)  # the last two continue the fourth
DEGREES = (2, 4)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
EIGHT_TO_TWO = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    attention: str
    recompute: bool = False
    lora: bool = False
    learns: bool = True


def family(name: str, **changes: Any) -> dict[str, Any]:
    return {**FAMILIES[name].config, **changes}


CASES = {
    "llama eager": Case(family("llama", **EIGHT_TO_TWO), "eager"),
    "llama sdpa, one key-value head": Case(family("llama", num_key_value_heads=1), "sdpa"),
    "qwen2 sdpa, recomputed": Case(family("qwen2"), "sdpa", recompute=True),
    "qwen3 eager, adapters": Case(family("qwen3", num_key_value_heads=4), "eager", lora=True),
    "gemma2 eager": Case(family("gemma2"), "eager"),
    "gemma3 sdpa": Case(family("gemma3_text", **EIGHT_TO_TWO), "sdpa"),
    "gemma2 flex": Case(family("gemma2"), "flex_attention", learns=False),
    "gemma3 flash 2": Case(family("gemma3_text", **EIGHT_TO_TWO), "flash_attention_2"),
    "gpt_oss eager": Case(family("gpt_oss", **EIGHT_TO_TWO, rope_parameters=PLAIN_ROPE), "eager"),
    "qwen3_moe eager": Case(family("qwen3_moe"), "eager"),
    # Keys wider than values.
    "deepseek_v3 sdpa": Case(family("deepseek_v3", v_head_dim=6, first_k_dense_replace=2), "sdpa"),
}


class Trial:
    """A case's model and row on this rank, and what it gives one sequence at a time."""

    def __init__(self, case: Case, folder: Path) -> None:
        flash = case.attention.startswith("flash")
        self.kernel = put_plain_kernel() if flash else None
        # flash attention cannot be asked for without a GPU; flex_attention compiles itself for each sequence
        plain = "eager" if flash or case.attention == "flex_attention" else case.attention
        config = model_config(write_model(folder, case.config), attn_implementation=plain)
        self.model = build_model(config, load_weights=True)
        self.lora = Adapters(self.model, Lora(rank=4, alpha=8.0), seed=1, path="") if case.lora else None
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:  # they start at zero, where those of the other half have no gradient
                nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
        if case.recompute:
            recompute_activations(self.model, True)
        draw = np.random.default_rng(0)
        self.tokens_T = draw.integers(0, VOCAB, sum(LENGTHS))
        self.cotangent_TE = torch.from_numpy(draw.standard_normal((sum(LENGTHS), case.config["hidden_size"]))).float()
        self.parents = PARENTS
        self.learns = case.learns
        with torch.set_grad_enabled(case.learns):
            self.hidden_TE = self._one_by_one()
        self.gradients = self._gradients(self.hidden_TE, self.cotangent_TE)
        self.model.config.get_text_config()._attn_implementation = case.attention
        if not can_share_prompts(self.model):
            self.parents = (-1,) * len(LENGTHS)
            with torch.set_grad_enabled(case.learns):
                self.hidden_TE = self._one_by_one(plain)
            self.gradients = self._gradients(self.hidden_TE, self.cotangent_TE)

    def _one_by_one(self, attention: str = "") -> Tensor:
        text = self.model.config.get_text_config()
        current, text._attn_implementation = text._attn_implementation, attention or text._attn_implementation
        parts = []
        for i, parent in enumerate(self.parents):
            rows = [*(_rows(parent) if parent >= 0 else ()), *_rows(i)]
            whole = backbone(self.model, input_ids=torch.from_numpy(self.tokens_T[rows])[None], use_cache=False)
            parts.append(whole[-LENGTHS[i] :])
        text._attn_implementation = current
        return torch.cat(parts)

    def shared(self, group: SequenceGroup) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's hidden states, and its gradients."""
        padding = group.padding(len(self.tokens_T))
        micro = whole_row(LENGTHS, self.tokens_T, self.parents).padded(padding)
        row, _ = packed_row(self.model, Staging(torch.device("cpu")), micro)
        own = torch.from_numpy(group.own_rows(micro.num_tokens))
        inputs = {**row.inputs, **{name: row.inputs[name][:, own] for name in ("input_ids", "position_ids")}}
        cotangent_TE = nn.functional.pad(self.cotangent_TE, (0, 0, 0, padding))
        with row.attending(), sharing(group), torch.set_grad_enabled(self.learns):
            hidden = backbone(self.model, **inputs)
            return hidden.detach(), self._gradients(hidden, cotangent_TE[own])

    def _gradients(self, hidden_TE: Tensor, cotangent_TE: Tensor) -> dict[str, Tensor]:
        if not self.learns:
            return {}
        (hidden_TE * cotangent_TE).sum().backward()
        learned = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        found = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in learned.items()}
        self.model.zero_grad(set_to_none=True)
        return found


def backbone(model: PreTrainedModel, **inputs: Any) -> Tensor:
    hidden: Tensor = model.base_model(**inputs)[0][0]
    return hidden


def _rows(segment: int) -> range:
    start = sum(LENGTHS[:segment])
    return range(start, start + LENGTHS[segment])


def relative(ours: Tensor, theirs: Tensor, scale: float) -> float:
    return float((ours - theirs).abs().max()) / scale


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """Bytes of each exchange."""
    real, sizes = dist.all_to_all_single, []

    def counting(received: Tensor, sent: Tensor, **kwargs: Any) -> Any:
        sizes.append(sent.nbytes)
        return real(received, sent, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield sizes
    finally:
        dist.all_to_all_single = real


def report(case: Case, folder: Path, groups: dict[int, SequenceGroup]) -> dict[str, Any]:
    trial, found = Trial(case, folder), {}
    for degree, group in groups.items():
        if trial.kernel:
            trial.kernel.calls.clear()
        hidden, gradients = trial.shared(group)
        parts = [torch.empty_like(hidden) for _ in range(degree)]
        dist.all_gather(parts, hidden.contiguous(), group=group.group)
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group.group)
        theirs = trial.hidden_TE.detach()
        largest = max((float(each.abs().max()) for each in trial.gradients.values()), default=0.0)
        found[degree] = {
            "hidden": relative(torch.cat(parts)[: sum(LENGTHS)], theirs, float(theirs.abs().max())),
            "gradients": {
                name: relative(gradients[name], each, max(float(each.abs().max()), 1e-3 * largest))
                for name, each in trial.gradients.items()
            },
            "flash": [list(call) for call in trial.kernel.calls] if trial.kernel else [],
        }
    return found


def exchanged(group: SequenceGroup) -> dict[str, Any]:
    """Whether each element says after an exchange where it should be: an element is its row, head and number."""
    size, rows, tokens = group.size, 3, 3 * group.size
    own = slice(group.rank * rows, (group.rank + 1) * rows)

    def numbered(heads: int, dim: int) -> Tensor:
        return torch.arange(tokens * heads * dim, dtype=torch.float32).view(1, tokens, heads, dim)

    def mine(whole: Tensor) -> Tensor:
        heads = whole.shape[2] // size
        return whole[:, :, group.rank * heads : (group.rank + 1) * heads]

    wide, narrow = numbered(2 * size, 5), numbered(size, 2)
    given = [each[:, own].transpose(1, 2).requires_grad_() for each in (wide, narrow)]  # not contiguous
    with counted_messages() as sizes:
        q, v = rows_to_heads(given, group)
    back = heads_to_rows(q.transpose(1, 2), group)
    (q * mine(wide).transpose(1, 2)).sum().backward()
    given[1].grad = None
    whole = mine(wide).clone().requires_grad_()
    heads_to_rows(whole, group).sum().backward()  # a gradient whose elements are one in memory
    small, large = rows_to_heads([given[0].detach(), given[1].detach().double()], group)
    assert whole.grad is not None
    assert given[0].grad is not None
    return {
        "heads of all rows": torch.equal(q, mine(wide).transpose(1, 2))
        and torch.equal(v, mine(narrow).transpose(1, 2)),
        "rows of all heads": torch.equal(back, wide[:, own]),
        "gradient of rows": torch.equal(given[0].grad, wide[:, own].transpose(1, 2)),
        "gradient of heads": torch.equal(whole.grad, torch.ones_like(whole)),
        "two dtypes": torch.equal(small, q) and torch.equal(large, v.double()),
        "messages": len(sizes),
    }


SAMPLES = ([0, 1, 2], [], [3], [4, 5])  # of each rank


def shared_samples(group: SequenceGroup, rank: Rank) -> dict[str, Any]:
    """Return what the group has of a batch, what comes back of it, and what a heartbeat says meanwhile."""
    own = make_batch(6).select(SAMPLES[rank.rank])
    activity.begin("update", 1, counted=True)
    inside = share_batch(own, group.group, torch.device("cpu"))
    said = activity.snapshot()
    activity.end()
    assert said is not None
    assert inside.batch.columns.keys() == own.columns.keys()
    assert all(inside.batch[name].dtype == column.dtype for name, column in own.columns.items())
    assert inside.batch["tokens_T"][inside.own_T].tolist() == own["tokens_T"].tolist()
    assert inside.batch["length_B"][inside.own_B].tolist() == own["length_B"].tolist()
    part = np.zeros(inside.batch.num_tokens, dtype=np.float32)
    part[group.rank :: group.size] = 1 + group.rank
    joined = sum_of_ranks(part, group.group, torch.device("cpu"))
    return {"tokens": inside.batch["tokens_T"].tolist(), "joined": joined.tolist(), "said": said["what"]}


def refusals(folder: Path, rank: Rank) -> dict[str, str]:
    """What an engine of four ranks says when it is built with attention that goes wrong in some way."""

    def other_keys(x: Tensor, heads: int, group: SequenceGroup) -> Tensor:
        return x.repeat(1, group.size // x.shape[1], 1, 1)

    def of_one_rank(x: Tensor, group: SequenceGroup) -> Tensor:
        return heads_to_rows(x, group) + (group.rank == 2)

    def nothing_shared(*_: Any) -> Any:
        raise RuntimeError("no such exchange")

    ways: dict[str, tuple[str, Any]] = {
        "nothing": ("heads_to_rows", heads_to_rows),
        "keys of other heads": ("for_each_rank", other_keys),
        "one rank's rows": ("heads_to_rows", of_one_rank),
        "an error": ("rows_to_heads", nothing_shared),
    }
    config = train_config(write_model(folder, family("qwen2")), sequence_parallel=4, micro_batch_tokens=16)
    said = {}
    for way, (name, wrong) in ways.items():
        right = getattr(split_attention, name)
        setattr(split_attention, name, wrong)
        try:
            DdpTrainEngine.build(config, rank)
            said[way] = "built"
        except ModelError as error:
            said[way] = error.message
        finally:
            setattr(split_attention, name, right)
    return said


def main(out: Path) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    join_group(rank, "cpu")
    groups = {degree: sequence_group(rank, degree) for degree in DEGREES}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = report(case, out / f"{rank.rank} {name}", groups)
    found["exchange"] = {degree: exchanged(group) for degree, group in groups.items()}
    found["samples"] = {degree: shared_samples(group, rank) for degree, group in groups.items()}
    found["refusals"] = refusals(out / f"{rank.rank} refused", rank)
    (out / f"rank{rank.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
