"""Print what `rlctl check-config` finds: what the spec means in tables, then what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rlctl.models.run_export import RunExport
from rlctl.show.problems import print_problems
from rlctl.show.screen import Screen
from rlctl.show.text_format import counted, number
from specs.packages import page
from specs.schema.engines.engine_table import engine_of
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.environment import EnvironmentSection
from specs.schema.rank_groups import RankGroup, mesh_of, sequence_groups, shard_groups
from specs.schema.recipes import RlSpec, RowsSpec, SamplingSpec, sampling_of
from specs.schema.role_section import RoleSection
from specs.schema.roles import RoleName
from specs.schema.spec import Spec
from specs.terminal import visible
from specs.text import show

if TYPE_CHECKING:
    from pathlib import Path

    from rlctl.check.environments import TriedEnvironment
    from rlctl.check.findings import Findings
    from rlctl.check.own_functions import RewardCall
    from workers.data.first_rows import Pieces

SHOWN_TEXT = 400  # characters of a turn or a reply
SHOWN_IDS = 6  # of the tokens at either side of where something is appended
FORMS = {
    "tools": "tools",
    "text": "replies to text",
    "agent": "a loop of its own: imported, not run",
    "program": "run once",
}
MOST_ROWS = 8  # groups of a role, and hosts, that are shown; JSON has them all


def print_findings(findings: Findings, meaning: dict[str, Any], spec_path: Path) -> None:
    """Print tables and warnings to stdout, problems to stderr. `meaning`: what `as_dict` returns."""
    out, problems = Screen(), Screen(stderr=True)
    if findings.spec and findings.plan:
        for table in _tables(findings, findings.spec, meaning):
            if not isinstance(table, Table) or table.row_count:
                plain = isinstance(table, Text)  # whose styles say something
                out.print(table, highlight=not plain, soft_wrap=not isinstance(table, Table))
                out.print()
    for note in findings.notes:
        out.print(Text.assemble(("note:", "bold"), f" {note}"), soft_wrap=True)
        out.print()
    print_problems(out, "warning", findings.warnings)
    print_problems(problems, "error", findings.problems)
    if findings.ok:
        out.print(Text.assemble(("ok", "green"), f": {spec_path}"), soft_wrap=True)
    else:
        problems.print(f"{counted(len(findings.problems), 'problem')} in {spec_path}", soft_wrap=True)


def _tables(findings: Findings, spec: Spec, meaning: dict[str, Any]) -> Iterator[Table | str | Text]:
    """Yield what the spec means; tables without rows are not shown."""
    roles: dict[RoleName, dict[str, Any]] = meaning["roles"]
    yield _roles_table(spec, roles)
    attention = _table("role", "attention asked", "in effect", "why")
    kernels = _table("role", "kernels asked", "in effect", "why")
    interpreters = _table("role", "interpreter", "has")
    for name, role in roles.items():
        if role["attn_asked"]:
            attention.add_row(name, role["attn_asked"], role["attn_implementation"] or "–", role["attn_why"])
        if role["kernels_asked"] not in (None, OWN_MODULES):
            kernels.add_row(name, role["kernels_asked"], role["kernels"], role["kernels_why"])
        if role["versions"]:
            versions = ", ".join(f"{package} {version}" for package, version in role["versions"].items())
            interpreters.add_row(name, role["python"], versions)
    yield from (attention, kernels, interpreters, _groups_table(spec))
    if any(spec.role(name).leaves_host for name in spec.roles):
        yield _hosts_table(meaning["hosts"])
    for name, role in roles.items():
        if role["not_known"]:
            head = f"not known of the engine {role['engine']} ({name}), so neither checked nor planned"
            yield f"{head}: {', '.join(role['not_known'])}; its table may say it ({page('engines.md')})"
    yield _arithmetic(spec, meaning)
    yield from map(_call_table, findings.calls)
    for one in findings.environments:
        yield _environment_table(one)
    if findings.rows.example:
        yield findings.rows.summary
        yield from _example(findings.rows.example)
    if findings.probe:
        from rlctl.check.meta_report import probe_table

        yield probe_table(spec, findings.probe)


def _table(*columns: str) -> Table:
    """Make a table whose cells wrap."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _roles_table(spec: Spec, roles: dict[RoleName, dict[str, Any]]) -> Table:
    table = Table("role", "engine", "model", "dtype", "processes", "devices", "threads", box=None, pad_edge=False)
    for name, role in roles.items():
        nodes = f" on {role['nodes']} nodes" if role["nodes"] > 1 else ""
        places = (f"{role['processes']} × {role['launcher']}{nodes}", _devices(role["devices"], ""), role["threads"])
        path = _named(spec.model_path(name)) if role["engine"] else None
        dtype = f"{role['dtype']} (auto)" if role["dtype_asked"] == "auto" else role["dtype"]
        table.add_row(name, *(str(cell or "–") for cell in (role["engine"], path, dtype)), *map(str, places))
    return table


def _named(path: str) -> str:
    """Name a model for a person: `runs/warm, step 120` for a run's export."""
    return str(RunExport.of(path) or path)


# ── places ────────────────────────────────────────────────────────────────────────────────────────


def _groups_table(spec: Spec) -> Table:
    """Show which ranks hold parts of one model, or share samples."""
    table = Table("role", "mesh", "group", "ranks", "node", "devices", box=None, pad_edge=False)
    for name in spec.roles:
        section = spec.role(name)
        if section.processes > 1 and engine_of(section) is not None and mesh_of(section) is None:
            table.add_row(name, "not known", "", _span(range(section.processes)), "", "")
        for mesh, groups in _meshes(section):
            for group in groups[:MOST_ROWS]:
                table.add_row(name, mesh, *_group_row(group))
                name = mesh = ""
            if len(groups) > MOST_ROWS:
                table.add_row("", "", f"… {len(groups) - MOST_ROWS} more")
    return table


def _meshes(section: RoleSection) -> Iterator[tuple[str, Sequence[RankGroup]]]:
    """Yield what the role's ranks are sharded along, and the groups: copies of the model, then sharers of samples."""
    mesh = mesh_of(section)
    if mesh is None:
        return
    if mesh.shard > 1 or mesh.axes:
        axes = {"replicate": mesh.replicate, "shard": mesh.shard}
        axes = dict(mesh.axes) if mesh.axes and mesh.axes.keys() - axes else axes  # the engine's own names
        yield " × ".join(f"{axis} {ranks}" for axis, ranks in axes.items()), shard_groups(section)
    if shared := sequence_groups(section):
        yield f"data {len(shared)} × sequence {mesh.sequence}", shared


def _group_row(group: RankGroup) -> tuple[str, str, str, str]:
    by_node = [[device for rank in group.ranks if node in rank.on for device in rank.devices] for node in group.nodes]
    places = "; ".join(dict.fromkeys(map(_devices, by_node)))
    return str(group.number), _span([rank.rank for rank in group.ranks]), _span(group.nodes), places


def _devices(devices: Sequence[int], word: str = "GPU ") -> str:
    return f"{word}{_span(devices)}" if devices else "CPU"


def _span(numbers: Sequence[int]) -> str:
    """Write numbers as `3`, `0–7`, or, where they have gaps, `0, 2, 5`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first}–{last}"
    return ", ".join(map(str, numbers))


def _hosts_table(hosts: list[dict[str, Any]]) -> Table:
    """Show the roles of each host."""
    table = Table("host", "role", "ranks", "devices", box=None, pad_edge=False)
    for place in hosts:
        host = place["host"]
        for role, held in place["roles"].items():
            table.add_row(host, role, _span(held["ranks"]), _devices(held["devices"]))
            host = ""
    return table


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────


def _arithmetic(spec: Spec, meaning: dict[str, Any]) -> str:
    """Say what a step and a run amount to, where the reference is and how weights travel."""
    of, ref = meaning["batch"], meaning["reference"]
    run = f"{counted(of['steps'], 'step')} = {counted(of['optimizer_steps'], 'optimizer step')}"
    if others := [f"{of[f'{role}_optimizer_steps']} of the {role}" for role in spec.losses if role != spec.lead]:
        run += f" of the {spec.lead}, {', '.join(others)}"
    tokens = f"at most {_longest(spec)}, {of['micro_batch_tokens']} in a forward pass"
    if of["sequence_parallel"] > 1:
        tokens += f",\n       {spec.lead_section.row_tokens} in a row that {of['sequence_parallel']} ranks share"
    held = f"{_named(ref['model'])} ({ref['why']}), held by {ref['engine']} on {_devices(ref['devices'])}"
    lines = {"step": _step(spec, of), "run": run, "tokens": tokens, "ref": held if ref["loaded"] else ref["why"]}
    if (sampling := sampling_of(spec)) is not None:
        if sampling.environments:
            lines["env"] = "\n       ".join(map(_limits, sampling.environments, meaning["environments"]))
        lines["sync"] = _way(sampling, meaning["sync"])
        if ahead := sampling.rollout.max_staleness:
            when, old = (f"the next {ahead} steps", f"1 to {ahead} steps") if ahead > 1 else ("the next step", "1 step")
            old = f"at most {counted(ahead, 'step')}" if sampling.rollout.in_flight else old
            every = f"every {ahead} steps" if ahead > 1 and not sampling.rollout.in_flight else "every step"
            drawn = f"the samples of {when} are drawn while the actor learns"
            lines["ahead"] = f"{drawn}: {old} old; weights travel {every}"
    if spec.every is not None:
        lines["eval"] = _evaluation(spec)
    return "\n".join(f"{name:6} {line}" for name, line in lines.items())


def _limits(section: EnvironmentSection, meaning: dict[str, Any]) -> str:
    """Say how far an episode goes."""
    calls = [counted(section.max_tool_calls, "tool call")] * ((meaning["tried"] or {}).get("mode") != "text")
    limits = ", ".join([counted(section.max_turns, "turn"), *calls, f"{section.max_episode_tokens} tokens"])
    times = f"{section.call_timeout_s:g} s for a call, {section.episode_timeout_s:g} s for all of them"
    return f"{', '.join(section.sources)}: at most {limits}; {times}"


def _evaluation(spec: Spec) -> str:
    """Say when the run is evaluated, and on what."""
    on = []
    if isinstance(spec, RowsSpec) and spec.eval is not None:
        on.append(f"the loss of {counted(spec.eval.rows, 'pair' if spec.sequences_per_row > 1 else 'row')}")
    for one in spec.evaluations:
        how = f"temperature {one.temperature:g}" if one.temperature else "greedy"
        times = f" × {one.samples_per_prompt}" if one.samples_per_prompt > 1 else ""
        on.append(f"{_drawn(spec)} of {counted(one.prompts, 'prompt')}{times} ({one.name}, {how})")
    return "\n       ".join([f"before the first step, after every {spec.every} and the last:", *on])


def _longest(spec: Spec) -> str:
    if not isinstance(spec, RlSpec):
        return f"{spec.max_sequence_tokens} in a sequence"
    if spec.environments:
        return f"{spec.max_sequence_tokens} in an episode, {spec.data.max_response_tokens} in a turn"
    return f"{spec.data.max_prompt_tokens} + {spec.data.max_response_tokens} = {spec.max_sequence_tokens} in a sequence"


def _drawn(spec: Spec) -> str:
    return "episodes" if isinstance(spec, RlSpec) and spec.environments else "completions"


def _step(spec: Spec, of: dict[str, Any]) -> str:
    """Describe the batch of a step."""
    if not isinstance(spec, RlSpec):
        return counted(of["rows_per_step"], "pair" if of["sequences_per_row"] > 1 else "row")
    step = f"{of['prompts_per_step']} prompts × {of['group_size']} {_drawn(spec)} = {of['samples_per_step']} samples"
    if of["mini_batches_per_step"] > 1:
        step += f" → {of['mini_batches_per_step']} mini-batches of {of['samples_per_mini_batch']}"
    if of["epochs_per_step"] > 1:
        step += f" × {of['epochs_per_step']} epochs"
    if spec.algorithm.advantage.greedy_baseline:
        step += f"\n       and {of['prompts_per_step']} greedy {_drawn(spec)} to compare with"
    elif spec.algorithm.dynamic_sampling:
        refills = counted(spec.algorithm.max_refills, "refill")
        step += f"\n       groups of equal scores are thrown away, with {refills} at most in a step"
    return step


def _way(spec: SamplingSpec, sync: dict[str, Any]) -> str:
    """Say how weights travel."""
    way = f"weights travel by {sync['transport']} ({sync['why']})"
    if sync["transport"] != "shm":
        way += f", in buckets of {spec.sync.bucket_MiB:g} MiB"
    way += ", only what changed" if spec.sync.delta else ""
    if spec.rollout.leaves_host:
        links = [f"{counted(link['replicas'], 'replica')} on {link['host']}" for link in sync["to"]]
        more = [f"{len(links) - MOST_ROWS} more hosts"] if len(links) > MOST_ROWS else []
        way += f"\n       from this host to {', '.join([*links[:MOST_ROWS], *more])}"
    return way


STYLES = {"learned": "bold green", "seen": "default", "special": "dim magenta", "learned special": "bold magenta"}


def _example(example: Sequence[Pieces]) -> Iterator[Text]:
    """Show the first row as the model sees it, and which of its tokens learn."""
    names = ("chosen", "rejected") if len(example) > 1 else ("row",)
    ends = all(any(kind == "learned special" for _, kind in pieces) for pieces in example)
    end = f"; the end of the turn is {'' if ends else 'not '}learned"
    legend = (("⟦learned⟧", STYLES["learned"]), ", seen, ", ("special tokens", STYLES["special"]))
    lines = [Text.assemble("first row: ", *legend, end)]
    for name, pieces in zip(names, example, strict=True):
        shown = (f"⟦{part}⟧" if kind.startswith("learned") else part for part, kind in pieces)
        styles = (STYLES[kind] for _, kind in pieces)
        lines.append(Text.assemble(f"{name:9}", *zip(map(visible, shown), styles, strict=True)))
    yield Text("\n").join(lines)


def _call_table(call: RewardCall) -> Table:
    """Show what a reward function gave the first row, or the end of its traceback."""
    score = call.traceback.strip() if call.score is None else number(call.score)
    table = Table(box=None, pad_edge=False, show_header=False)
    tried = show(call.completion) if call.completion else "none: the row has no column data.answer_column to try"
    cells = {"reward": call.path, "called for": call.row.rpartition("/")[2], "completion": tried}
    for row in (cells | {"score": score}).items():
        table.add_row(*row)
    return table


def _environment_table(one: TriedEnvironment) -> Table:
    """Show what an environment is, what the model sees of it, and what came of a scripted turn."""
    rows = [("environment", f"{one.name}: {FORMS[one.mode]}" if one.mode else one.name)]
    rows += [("tool", f"{tool['name']}({tool['arguments']})  {tool['about']}") for tool in one.tools]
    rows += [("reset for", one.row.rpartition("/")[2])] if one.row and one.mode in ("tools", "text") else []
    if one.prompt_tokens is not None:
        of_tools = f", {one.tools_tokens} of them for the tools" if one.tools else ""
        rows.append(("prompt", f"{counted(one.prompt_tokens, 'token')}{of_tools}"))
    rows += [("scripted turn", show(one.turn, SHOWN_TEXT))] if one.turn else []
    if one.reply is not None:
        wrong = "it loses the episode" if one.reply_lost else "an error"
        note = f" ({wrong}; the arguments are invented)" * one.reply_error
        rows.append(("reply", show(one.reply, SHOWN_TEXT) + note))
    if one.turn_ids:
        ends = [" ".join(map(str, ids)) for ids in (one.turn_ids[-SHOWN_IDS:], one.suffix_ids[:SHOWN_IDS])]
        rows.append(("appended", f"{counted(len(one.suffix_ids), 'token')}: … {ends[0]} | {ends[1]} …"))
    rows += [("printed", one.output.strip())] if one.output.strip() else []
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in rows:
        table.add_row(name, Text(visible(text)))
    return table
