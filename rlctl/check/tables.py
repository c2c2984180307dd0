"""Print what `rlctl check-config` finds: what the spec means in tables, then what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rlctl.check.meaning import batch, hosts, links, reference, roles
from rlctl.preflight.role_choices import role_attention, role_kernels
from rlctl.processes.placement import Plan
from rlctl.show.problems import print_problems
from rlctl.show.screen import Screen
from rlctl.show.text_format import counted, number
from specs.packages import page
from specs.rules.transport_rules import choose_transport
from specs.schema.engines.engine_table import engine_of
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.rank_groups import RankGroup, mesh_is_known, mesh_of, sequence_groups, shard_groups
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR
from specs.schema.spec import Spec
from specs.text import show

if TYPE_CHECKING:
    from rlctl.check.findings import Findings
    from rlctl.check.meta_build import ProbeFindings
    from rlctl.check.reward_calls import RewardCall

PLACEMENT_ROWS = 8  # groups of a role that the table of placement shows; JSON has them all


def print_findings(findings: Findings, spec_path: Path) -> None:
    """Print tables and warnings to stdout, problems to stderr."""
    out, problems = Screen(), Screen(stderr=True)
    if findings.spec and findings.plan:
        for table in _tables(findings, findings.spec, findings.plan, spec_path.absolute().parent):
            if isinstance(table, str) or table.row_count:
                out.print(table, highlight=True, soft_wrap=isinstance(table, str))
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


def _tables(findings: Findings, spec: Spec, plan: Plan, spec_dir: Path) -> Iterator[Table | str]:
    """Yield what the spec means; tables without rows are not shown."""
    elsewhere = findings.elsewhere
    listed = roles(spec, plan, spec_dir, elsewhere=elsewhere)
    yield _roles_table(spec, listed)
    yield _attention(spec, spec_dir, elsewhere)
    yield _kernels(spec, spec_dir, elsewhere)
    yield _interpreters_table(spec, listed)
    yield _groups_table(spec)
    if any(spec.role(name).leaves_host for name in spec.roles):
        yield _hosts_table(spec, plan)
    for name, role in listed.items():
        if role["not_known"]:
            head = f"not known of the engine {role['engine']} ({name}), so neither checked nor planned"
            yield f"{head}: {', '.join(role['not_known'])}; its table may say it ({page('engines.md')})"
    yield _arithmetic(spec, plan)
    yield from map(_call_table, findings.calls)
    if findings.probe:
        yield from _probe_tables(spec, spec_dir, findings.probe)


def _table(*columns: str) -> Table:
    """Make a table whose cells wrap."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────


def _roles_table(spec: Spec, listed: dict[str, dict[str, Any]]) -> Table:
    table = Table("role", "engine", "model", "dtype", "processes", "devices", "threads", box=None, pad_edge=False)
    for name, role in listed.items():
        path = spec.model_path(name)
        cells = (role["engine"], path if role["engine"] else "", role["dtype"])
        nodes = f" on {role['nodes']} nodes" if role["nodes"] > 1 else ""
        places = (f"{role['processes']} × {role['launcher']}{nodes}", _devices(role["devices"], ""), role["threads"])
        table.add_row(name, *(str(cell or "–") for cell in cells), *map(str, places))
    return table


def _attention(spec: Spec, spec_dir: Path, elsewhere: bool) -> Table:
    """Show for each role that has attention what was asked for and what will be in effect."""
    table = _table("role", "attention asked", "in effect", "why")
    for role in spec.roles:
        found = role_attention(spec, role, spec_dir, elsewhere=elsewhere)
        if found is not None:
            engine = engine_of(spec.role(role))
            its_own = "not known" if engine is not None and engine.attention is None else "its own"
            effect = "none" if found.problem else found.implementation or its_own
            table.add_row(role, found.asked, effect, found.problem or found.why)
    return table


def _kernels(spec: Spec, spec_dir: Path, elsewhere: bool) -> Table:
    """Show each role that asks for other kernels than its model's own modules."""
    table = _table("role", "kernels asked", "in effect", "why")
    for role in spec.roles:
        found = role_kernels(spec, role, spec_dir, elsewhere=elsewhere)
        if found is not None and found.asked != OWN_MODULES:
            table.add_row(role, found.asked, "none" if found.problem else found.kernels, found.problem or found.why)
    return table


def _interpreters_table(spec: Spec, listed: dict[str, dict[str, Any]]) -> Table:
    """Show roles that run in another interpreter than ours, and what it has installed."""
    table = _table("role", "interpreter", "has")
    for name, role in listed.items():
        if spec.role(name).python:
            packages = ", ".join(f"{package} {version}" for package, version in role["versions"].items())
            table.add_row(name, role["python"], packages or "–")
    return table


# ── places ────────────────────────────────────────────────────────────────────────────────────────


def _groups_table(spec: Spec) -> Table:
    """Show which ranks hold parts of one model, or share samples."""
    table = Table("role", "mesh", "group", "ranks", "node", "devices", box=None, pad_edge=False)
    for name in spec.roles:
        section = spec.role(name)
        if mesh_of(section) is None and section.processes > 1 and not mesh_is_known(section):
            table.add_row(name, "not known", "", _span(range(section.processes)), "", "")
        for mesh, groups in _meshes(section):
            shown = groups if len(groups) <= PLACEMENT_ROWS else [*groups[: PLACEMENT_ROWS - 2], groups[-1]]
            for group in shown:
                if group is shown[-1] and len(shown) < len(groups):
                    table.add_row("", "", f"… {len(groups) - len(shown)} more")
                table.add_row(name, mesh, *_group_row(group))
                name = mesh = ""
    return table


def _meshes(section: RoleSection) -> Iterator[tuple[str, Sequence[RankGroup]]]:
    """Yield what the role's ranks are cut along, and the groups: copies of the model, then sharers of samples."""
    mesh, engine = mesh_of(section), engine_of(section)
    if mesh is None:
        return
    if mesh_of(section.model_copy(update={"sequence_parallel": 1})) is not None:
        axes = {"replicate": mesh.replicate, "shard": mesh.shard}
        own = (engine.reported_mesh(section.processes) if engine is not None else None) or {}
        axes = own if own.keys() - axes else axes  # where the engine has names of its own
        yield " × ".join(f"{axis} {ranks}" for axis, ranks in axes.items()), shard_groups(section)
    if shared := sequence_groups(section):
        yield f"data {len(shared)} × sequence {mesh.sequence}", shared


def _group_row(group: RankGroup) -> tuple[str, str, str, str]:
    by_node = [[device for rank in group.ranks if rank.node == node for device in rank.devices] for node in group.nodes]
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


def _hosts_table(spec: Spec, plan: Plan) -> Table:
    """Show who sits where, host by host."""
    table = Table("host", "role", "ranks", "devices", box=None, pad_edge=False)
    for place in hosts(spec, plan):
        host = place["host"]
        for role, held in place["roles"].items():
            table.add_row(host, role, _span(held["ranks"]), _devices(held["devices"]))
            host = ""
    return table


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────


def _arithmetic(spec: Spec, plan: Plan) -> str:
    """Say what a step and a run amount to, where the reference is and how weights travel."""
    of, ahead = batch(spec), spec.rollout.max_staleness
    transport, why = choose_transport(spec)
    learners = [f"{spec.optimizer_steps_of(role)} of the {role}" for role in spec.losses if role != ACTOR]
    drawn = f"{of['prompts_per_step']} prompts × {of['group_size']} completions = {of['samples_per_step']} samples"
    if of["mini_batches_per_step"] > 1:
        drawn += f" → {of['mini_batches_per_step']} mini-batches of {of['samples_per_mini_batch']}"
    if of["epochs_per_step"] > 1:
        drawn += f" × {of['epochs_per_step']} epochs"
    if spec.algorithm.advantage.greedy_baseline:
        drawn += f"\n       and {of['prompts_per_step']} greedy completions to compare with"
    elif spec.algorithm.dynamic_sampling:
        refills = counted(spec.algorithm.max_refills, "refill")
        drawn += f"\n       groups of equal scores are thrown away, with {refills} at most in a step"
    run = f"{counted(of['steps'], 'step')} = {counted(of['optimizer_steps'], 'optimizer step')}"
    tokens = f"{spec.data.max_prompt_tokens} + {spec.data.max_response_tokens} = {of['max_sequence_tokens']}"
    tokens = f"at most {tokens} in a sequence, {of['micro_batch_tokens']} in a forward pass"
    if of["sequence_parallel"] > 1:
        tokens += f",\n       {spec.actor.row_tokens} in a row that {of['sequence_parallel']} ranks share"
    sync = f"weights travel by {transport} ({why})"
    if transport != "shm":
        sync += f", in buckets of {spec.sync.bucket_MiB:g} MiB"
    lines = {
        "step": drawn,
        "run": run + "".join([" of the actor, ", ", ".join(learners)] if learners else []),
        "tokens": tokens,
        "ref": _reference(spec),
        "sync": f"{sync}{', only what changed' if spec.sync.delta else ''}{_links(spec, plan)}",
    }
    if ahead:
        when, old = (f"the next {ahead} steps", f"1 to {ahead} steps") if ahead > 1 else ("the next step", "1 step")
        every = f"every {ahead} steps" if ahead > 1 else "every step"
        lines["ahead"] = f"the samples of {when} are drawn while the actor learns: {old} old; weights travel {every}"
    return "\n".join(f"{name:6} {line}" for name, line in lines.items())


def _reference(spec: Spec) -> str:
    found = reference(spec)
    if not found["loaded"]:
        return str(found["why"])
    return f"{found['model']} ({found['why']}), held by {found['engine']} on {_devices(found['devices'])}"


def _links(spec: Spec, plan: Plan) -> str:
    """Say where the weights go, of replicas that are not all on this host."""
    if not spec.rollout.leaves_host:
        return ""
    ways = [f"{counted(link['replicas'], 'replica')} on {link['host']}" for link in links(spec, plan)]
    if len(ways) > PLACEMENT_ROWS:
        ways = [*ways[: PLACEMENT_ROWS - 1], f"{len(ways) - PLACEMENT_ROWS + 1} more hosts"]
    return f"\n       from this host to {', '.join(ways)}"


# ── what was tried ────────────────────────────────────────────────────────────────────────────────


def _call_table(call: RewardCall) -> Table:
    """Show what a reward function gave the first row, or the end of its traceback."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("reward", call.path)
    table.add_row("called for", call.row.rpartition("/")[2])
    table.add_row("completion", show(call.completion))
    table.add_row("score", call.traceback.strip() if call.score is None else number(call.score))
    return table


def _probe_tables(spec: Spec, spec_dir: Path, found: ProbeFindings) -> Iterator[Table | str]:
    from rlctl.check.meta_report import RUN_NOTE, probe_table, run_table

    yield probe_table(spec, spec_dir, found)
    if found.level == "run":
        yield run_table(found)
        yield RUN_NOTE
