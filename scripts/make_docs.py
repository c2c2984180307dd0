"""Write what pages have of the source, so that it cannot drift: `spec.md` of the schema and of where metrics are made,
`coming-from.md` of other tools' keys, the end of `engines.md` of the families that tests train.

python scripts/make_docs.py            # write them
python scripts/make_docs.py --check    # exit 1 when a file is not what it would be
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from declared_metrics import declared  # noqa: E402
from families import COMPOSITES, FAMILIES, TRAINED  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from specs.load.keys import is_list, kind_of, tables_of  # noqa: E402
from specs.load.unknown_keys import foreign_keys  # noqa: E402
from specs.schema.algorithms.algorithm import Algorithm  # noqa: E402
from specs.schema.algorithms.algorithm_tables import ADVANTAGE_TABLES, LOSS_TABLES, PRESETS, ActorCritic, ValueLoss  # noqa: E402
from specs.schema.recipes import RECIPES, RlSpec  # noqa: E402
from specs.schema.role_section import LearningRole, ModelRole, Restartable, RoleSection  # noqa: E402
from specs.schema.spec import Spec  # noqa: E402
from specs.schema.table import Table, meaning_of  # noqa: E402
from specs.text import show  # noqa: E402

INTRO = """# The run spec, key by key

Generated from the tables of `specs/schema/spec.py` by `scripts/make_docs.py`; do not edit.

A run is one TOML file. `rlctl init SPEC.toml --preset NAME` writes a commented one, `rlctl check-config SPEC` says
what it means and what is wrong with it, and `--set a.b=c` changes a key for one call: the value is read as TOML, and as
plain text where it is not TOML. Entries of a list are counted from 0: `--set reward.terms.0.weight=2`.
Another `kind`, as in `--set algorithm.kind=gspo`, drops what the file wrote for its own: a key that the new kind lacks,
or has another default for, is not used, and a line says so. What `--set` itself sets always stays.

Types are strict: `"8"` is not 8, `true` is not 1, `1.0` is not a whole number (a whole number is a number, though). A
key that the schema does not know is an error, and so is one that has no effect under the chosen engine or algorithm.
Relative paths start at the spec file's folder, except `run.dir`, which starts where `rlctl` is called.
"""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def type_of(annotation: Any) -> str:
    """A type in the words of the error messages."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Annotated:
        return type_of(parts[0])
    if origin is Literal:
        return ", ".join(f"`{show(part)}`" for part in parts)
    if origin is tuple:
        many = len(parts) == 2 and parts[1] is Ellipsis
        inner = "table" if tables_of(annotation) else type_of(parts[0])
        return f"list of {inner}s" if many else f"list of {len(parts)} {inner}s"
    if origin is dict:
        return "table of texts" if parts[1] is str else "table"
    if tables_of(annotation):
        return "text, or table" if any(type_of(part) == "text" for part in parts) else "table"
    return ", or ".join(type_of(part) for part in parts if part is not type(None))


def bounds_of(field: FieldInfo) -> str:
    found = []
    for item in field.metadata:
        bounds = {sign: getattr(item, name, None) for name, sign in BOUNDS.items()}
        found += [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
    return ", ".join(found)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, Table):
        return f'`{{ kind = "{kind_of(type(value))}" }}`' if kind_of(type(value)) else "its defaults"
    return "unset" if value is None else f"`{show(value) or '{}'}`"


# Tables whose keys the sections of several roles have: each is described once, under this title.
SHARED: dict[type[Table], str] = {
    RoleSection: "every role",
    ModelRole: "roles with a model",
    LearningRole: "roles that learn",
    Restartable: "roles whose processes can be lost",
}
ALGORITHM = """\
`kind` names a preset of an advantage and a loss. Its keys are those that every algorithm has, those of its
advantage and those of its loss, side by side. How each is computed: [algorithms.md](algorithms.md)."""

ROWS = """\
`run.recipe` names one. It has `[run]`, `[model]`, `[checkpoint]`, `[cluster]` and `[[tracking]]` as above, an `[actor]`
(and a `[ref]`, for preferences) as above, and these."""
LAST = ("checkpoint", "cluster", "tracking")  # sections of every recipe that stand behind its own
BASE = (*Spec.model_fields, "actor", "ref")  # sections that recipes share

Keys = Mapping[str, FieldInfo]


def keys_of(table: type[Table]) -> Keys:
    """Return the keys that are described with this table, by name, its own first: those that no shared table has as
    they are."""
    shared = {name: field for base in SHARED if base in table.__mro__[1:] for name, field in base.model_fields.items()}
    return {
        name: field
        for name, field in sorted(table.model_fields.items(), key=lambda item: item[0] not in table.__annotations__)
        if name != "kind" and (name not in shared or repr(shared[name]) != repr(field))
    }


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines), ""]


def cells_of(table: type[Table], name: str, field: FieldInfo) -> list[str]:
    kind = " ".join(filter(None, (type_of(field.annotation), bounds_of(field))))
    return [f"`{field.alias or name}`", kind, default_of(field), meaning_of(table, name)]


def key_table(table: type[Table], keys: Keys) -> list[str]:
    return key_grid(cells_of(table, name, field) for name, field in keys.items())


def key_grid(rows: Iterable[Sequence[str]]) -> list[str]:
    return grid(("key", "type", "default", "meaning"), rows)


def name_of(table: type[Table]) -> str:
    """Return the `kind` that a table has, or stands for by default."""
    return kind_of(table) or str(table.model_fields["kind"].default)


def what(table: type[Table]) -> str:
    return " ".join(cleandoc(table.__doc__ or "").split())


def kinds_table(tables: Sequence[type[Table]]) -> list[str]:
    return grid(("`kind`", "what it is"), ((f"`{name_of(table)}`", what(table)) for table in tables))


def union_table(tables: Sequence[type[Table]], but: Collection[str] = ()) -> list[str]:
    """Return the keys of tables that a `kind` chooses between, each with the kinds that have it."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for table in tables:
        for name, field in keys_of(table).items():
            if name not in but:
                kinds.setdefault(tuple(cells_of(table, name, field)), []).append(f"`{name_of(table)}`")
    found = ((*cells, "all" if len(names) == len(tables) else ", ".join(names)) for cells, names in kinds.items())
    return grid(("key", "type", "default", "meaning", "`kind`"), found)


class Page:
    """The page as it grows. What stands in several places is described at the first."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.place: dict[tuple[type[Table], ...], str] = {}
        self.said: dict[tuple[str, ...], str] = {}  # cells of a key → the title that they stand below

    def section(self, path: str, tables: tuple[type[Table], ...], title: str) -> None:
        """Describe a table, or the several that its `kind` chooses between, and below it what it holds."""
        self.lines += [title, ""]
        if len(tables) > 1:
            self.lines += [*kinds_table(tables), *union_table(tables)]
            return
        (table,) = tables
        shared = [f"[{name}](#{name.replace(' ', '-')})" for base, name in SHARED.items() if base in table.__mro__[1:]]
        self.lines += [
            cleandoc(table.__doc__ or ""),
            *([f"It has the keys of {', of '.join(shared)}."] if shared else []),
        ]
        choice = {name: field for name, field in table.model_fields.items() if name == "kind"}  # not between tables
        keys = choice | keys_of(table)
        there = {name: self.said.setdefault(tuple(cells_of(table, name, keys[name])), title) for name in keys}
        places = [above for above in there.values() if above != title]
        again = {name: above for name, above in there.items() if places.count(above) > 2}
        rows = {name: cells_of(table, name, field) for name, field in keys.items() if name not in again}
        for name, cells in rows.items():
            if there_too := self.place.get(tables_of(keys[name].annotation)):
                cells[1] += f", as [`{there_too}`](#{there_too.replace('.', '').lower()})"
        self.lines += ["", *key_grid(rows.values())]
        for above in dict.fromkeys(again.values()):
            names, label = ", ".join(f"`{name}`" for name in again if again[name] == above), above.lstrip("# ")
            anchor = re.sub(r"[^\w -]", "", label).lower().replace(" ", "-")
            self.lines += [f"{names}: as in [{label}](#{anchor}).", ""]
        self.below(path, keys_of(table))

    def below(self, path: str, keys: Keys) -> None:
        for name, field in keys.items():
            place, tables = f"{path}.{name}" + (".N" if is_list(field.annotation) else ""), tables_of(field.annotation)
            if tables and tables not in self.place:
                self.place[tables] = place
                self.section(place, tables, f"### `{place}`")

    def roles(self) -> None:
        self.lines += ["## Keys of several roles", ""]
        for base, name in SHARED.items():
            self.lines += [f"### {name.capitalize()}", "", *key_table(base, keys_of(base))]
            self.below("actor", keys_of(base))

    def algorithm(self) -> None:
        losses = tuple(table for table in LOSS_TABLES if table is not ValueLoss)
        self.lines += ["## `[algorithm]`", "", ALGORITHM, ""]
        head = ("`kind`", "advantage", "loss", "defaults of its own", "what it is")
        self.lines += grid(head, (preset_row(kind, table) for kind, table in PRESETS.items()))
        self.lines += ["### Every algorithm", "", *key_table(Algorithm, keys_of(Algorithm))]
        self.below("algorithm", keys_of(Algorithm))
        not_written = {*Algorithm.model_fields, "corrected", "path"}
        self.lines += [
            "### Advantages",
            "",
            *kinds_table(ADVANTAGE_TABLES),
            *union_table(ADVANTAGE_TABLES, not_written),
        ]
        self.lines += ["### Losses", "", *kinds_table(losses), *union_table(losses, not_written)]
        critic = {name: field for name, field in ActorCritic.model_fields.items() if name not in Algorithm.model_fields}
        self.lines += ["### The critic", "", what(ValueLoss), "", *key_table(ActorCritic, critic)]

    def recipes(self) -> None:
        """Describe the sections that recipes have beside or in the place of those of `rl`."""
        self.lines += ["## Recipes that learn from rows", "", ROWS, ""]
        others = {name: recipe for name, recipe in RECIPES.items() if recipe is not RlSpec}
        self.lines += grid(
            ("`run.recipe`", "what it is"), ((f"`{name}`", what(table)) for name, table in others.items())
        )
        found: dict[str, dict[type[Table], None]] = {}
        for recipe in others.values():
            for name, field in recipe.model_fields.items():
                found.setdefault(name, {}).update(dict.fromkeys(tables_of(field.annotation)))
        known = {table for tables in self.place for table in tables}
        known |= {table for field in RlSpec.model_fields.values() for table in tables_of(field.annotation)}
        for name, tables in found.items():
            wider = {base for table in tables for base in table.__mro__[1:]}  # a table with more keys is there
            if new := tuple(table for table in tables if table not in known | wider and name not in BASE):
                self.section(name, new, f"### `[{name}]`, to learn from rows")


def preset_row(kind: str, table: type[Algorithm]) -> list[str]:
    bases = (table.advantage_table, table.loss_table, table.__mro__[1])
    default = {name: field.default for base in bases for name, field in base.model_fields.items()}
    own = [
        f"`{name} = {show(field.default)}`"
        for name, field in table.model_fields.items()
        if name != "kind" and field.default != default[name]
    ]
    names = [f"`{name_of(part)}`" for part in (table.advantage_table, table.loss_table)]
    return [f"`{kind}`", *names, ", ".join(own), what(table)]


def about(tables: Sequence[type[Table]]) -> str:
    """Return a section in a line; of several tables, the kinds that it may be."""
    if len(tables) > 1:
        return "one of the kinds " + ", ".join(f"`{kind_of(table)}`" for table in tables) + "."
    return what(tables[0]).partition(". ")[0].rstrip(".") + "."


def render() -> str:
    page = Page()
    page.lines = [INTRO, "`schema = 1` stands first. Sections of reinforcement learning:", ""]
    fields = dict(sorted(RlSpec.model_fields.items(), key=lambda item: (item[0] in LAST, not item[1].is_required())))
    sections = {name: found for name, field in fields.items() if (found := tables_of(field.annotation))}
    titles = {name: f"[[{name}]]" if is_list(field.annotation) else f"[{name}]" for name, field in fields.items()}
    for name, tables in sections.items():
        needed = "" if not fields[name].is_required() else " (required)"
        page.lines.append(f"- [`{titles[name]}`](#{name}){needed}: {about(tables)}")
    page.lines.append("")
    for name, tables in sections.items():
        if name == "reward":
            page.roles()
        if name == "algorithm":
            page.algorithm()
        else:
            page.section(name, tables, f"## `{titles[name]}`")
    page.recipes()
    return "\n".join(page.lines).rstrip() + "\n"


# ── metrics, in docs/spec.md ──────────────────────────────────────────────────────────────────────

METRICS = """## Every metric

`metrics.jsonl` in the run directory has one JSON object per step, `rlctl.load_metrics(RUN_DIR)` reads it ([from
Python](watching.md#from-python)), [trackers](watching.md#trackers) get the same names (TensorBoard and MLflow `pass_4`
for `pass@4`), and the [report](watching.md#the-report) draws them. Parts in angle brackets vary: `reward/term_<i>` is
entry `i` of `reward.terms`, from 0 on; `<role>` is a role of the run; `<set>` is the name of an evaluation. A number
that is not finite is written as `null`. Without a "when" a metric is there at every step of `rl`. Recipes that learn
from rows have of these `data/epoch`, `data/tokens`, `data/learned_tokens`, those of what learns, `time/`, `mem/` and
`perf/`; their evaluations have those of the objective under `eval/<set>/`, such as `eval/heldout/loss`, and with `sft`
`eval/<set>/perplexity`. With `[eval.generate]` these lines also have `sync/` and what evaluations of `rl` have.

An evaluation that samples also has, of its own completions, these with `eval/<set>/` in place of what stands before the
slash:
"""


def render_metrics() -> str:
    """One table, by the first part of the names."""
    told = sorted(declared(), key=lambda metric: metric.name.partition("/")[0])
    rows = [[f"`{metric.name}`", metric.unit, metric.meaning, metric.when] for metric in told]
    in_eval = ", ".join(f"`{metric.name}`" for metric in declared() if metric.in_eval)
    return "\n".join([f"{METRICS}{in_eval}.\n", *grid(("name", "unit", "meaning", "when"), rows)]).rstrip() + "\n"


# ── docs/coming-from.md ───────────────────────────────────────────────────────────────────────────

COMING_FROM = """# Coming from TRL, verl, OpenRLHF or prime-rl

Generated from `specs/load/foreign_keys.toml` by `scripts/make_docs.py`; do not edit.

```bash
rlctl init my.toml --from train.py          # a TRL script with GRPOConfig(…), SFTConfig(…), …: parsed, never run
rlctl init my.toml --from dpo.yaml          # what `trl dpo --config` takes; JSON too
rlctl init my.toml --from run_qwen3_4b.sh   # verl's overrides in a script, or its YAML
rlctl init my.toml --from rl.toml           # prime-rl
```

It prints what each key has become, and what was left out and why, all by the table below; the spec loads, and a comment
stands above each line that needs a person: what the file computes or does not say, reward functions, environments.
Defaults of theirs that differ from rlctl's are written out. A key of theirs in a spec, or after `--set`, is answered
from the same table: "here it is `algorithm.group_size`".

What differs in kind: a **step** is generate, score, learn, once (verl's training step, TRL's generation batch); a batch
is counted in **prompts** (`data.prompts_per_step`), each completed `algorithm.group_size` times, and divided into
`algorithm.mini_batches_per_step` optimizer steps; memory is set in **tokens** (`micro_batch_tokens`), and never
changes what is computed; rewards are a list of weighted terms; a reward function is
`score(prompt, completion, row)`, called for one completion ([rewards.md](rewards.md)).

"""
OF_ROWS = """
## Supervised fine-tuning, preferences and reward models

In recipes that learn from rows (`run.recipe` is `sft`, `preference` or `reward_model`) a step is one optimizer step on
`data.rows_per_step` rows or pairs of all ranks together, however they are split into micro-batches. Keys of TRL's
`SFTConfig`, `DPOConfig`, `KTOConfig` and `RewardConfig`, and a few of axolotl, LLaMA-Factory, verl and OpenRLHF; those
of the model, the optimizer and the run are in the table above. Where a reward model learns, `actor.` there is
`reward_model.`.

"""


def render_coming_from() -> str:
    """Render the table of all recipes, and that of those that learn from rows."""
    return COMING_FROM + _their_keys(of_rows=False) + OF_ROWS + _their_keys(of_rows=True)


def _their_keys(*, of_rows: bool) -> str:
    """Render a row for each row of the table, those without a key of ours last."""
    rows = sorted(foreign_keys(of_rows).items(), key=lambda row: not row[1].ours)
    cells = [
        (", ".join(f"`{key}`" for key in keys.split()), f"`{row.ours}`" if row.ours else "–", row.remark)
        for keys, row in rows
    ]
    return "| their key | here | |\n|---|---|---|\n" + "".join(f"| {' | '.join(row)} |\n" for row in cells)


# ── models, in docs/engines.md ────────────────────────────────────────────────────────────────────

MODELS = """## Models

The families that tests train and sample (`tests/support/families.py`), each with a few thousand parameters, from disk,
on CPUs, trained as {trained} (the rest in fp32); [on a GPU](gpu.md) only Qwen2's
shape was. Log-probs, gradients and weights after a step are those of transformers' own modules on one sequence at a
time: 2e-5 nats and 1e-4 of each tensor's largest gradient in fp32 (`tests/backends/test_protocol_sharded.py`). What is
not in the table is not refused: every start proves packing, the sampler its cache, and every sync both.

"""
MARK = "<!-- from here on written by scripts/make_docs.py -->"
AFTER_MODELS = """
**Refused**: layers of other kinds (indexed and compressed attention), encoder-decoder models, quantised weights,
latent attention with vLLM on the CPU, and sequences beyond the first context of a LongRoPE model.

### Layers that carry a state

Gated delta nets, Mamba 2 and short convolutions run over each sequence of a packed row by itself; completions begin in
the state in which their prompt ended, which is computed once. A build proves this, forward and backward, and the
sampler that decoding gives the model's own log-probs. `sequence_parallel` is refused. Kernels of
flash-linear-attention, causal-conv1d and mamba-ssm, which transformers takes where they are installed, were not tried;
without them transformers' torch formulas compute, which are slow for short sequences.

### Softcap, sinks, chunks, latent attention

Where sdpa does not know what a model does to its scores, `auto` takes `eager`: the model's own function, on batches of
sequences of like length, in training and over the sampler's cache. Windows and chunks are proven with short ones.
Latent attention trains and is sampled with keys and values unfolded: the cache holds them whole.

### Folders of several models

Multimodal checkpoints ({composites}) train their language model alone: nothing else is loaded. An export is the whole
folder as it came with the trained weights in place, loaded back by the class that it names. A critic or reward model
becomes a model of its own. Engines with models of their own (`megatron`, `vllm`, `sglang`) refuse such a folder.

### Mixtures of experts

The loss has no balancing term, routers add no noise, and in bf16 sampler and trainer may route a token differently:
expect a larger `rollout/logprob_gap`.
"""


def render_models() -> str:
    """Render a row for each family, and what is said of kinds of models."""
    trained = ", ".join(f"`{name}`" for name in TRAINED)
    heads = ("family", "what is special", "`megatron`", "`torch` sampler", "vLLM")
    rows = [
        [
            family.models,
            family.layout,
            "fp32" if family.megatron else "refused",
            "fp32",
            family.vllm,
        ]
        for family in FAMILIES.values()
    ]
    names = ", ".join(f"`{each['architectures'][0]}`" for each in COMPOSITES.values())
    return MODELS.format(trained=trained) + "\n".join(grid(heads, rows)) + AFTER_MODELS.format(composites=names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is stale")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages")
    given = parser.parse_args()
    check, docs = given.check, given.docs
    engines = (docs / "engines.md").read_text(encoding="utf-8").partition(MARK)[0]
    made = {
        "engines": f"{engines}{MARK}\n\n{render_models()}",
        "spec": f"{render()}\n{render_metrics()}",
        "coming-from": render_coming_from(),
    }
    pages = {docs / f"{name}.md": text for name, text in made.items()}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        names = ", ".join(f"docs/{path.name}" for path in stale)
        print(f"{names} would be written otherwise: run scripts/make_docs.py", file=sys.stderr)
        return 1
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
