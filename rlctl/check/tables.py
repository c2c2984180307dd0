"""What `rlctl check-config` prints: what the spec means in tables, then what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rlctl.check.meaning import batch, hosts, links, reference, roles
from rlctl.preflight.role_attention import role_attention
from rlctl.preflight.role_kernels import role_kernels
from rlctl.processes.placement import Plan
from rlctl.show.problems import print_problems
from rlctl.show.screen import Screen
from rlctl.show.text_format import counted, number
from specs.packages import page
from specs.rules.transport_rules import choose_transport
from specs.schema.engines.engine_table import engine_of
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.mesh import Mesh
from specs.schema.rank_groups import RankGroup, mesh_is_known, mesh_of, sequence_groups, shard_groups
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR
from specs.schema.spec import Spec
from specs.text import show

if TYPE_CHECKING:
    from rlctl.check.findings import Findings
    from rlctl.check.meta_build import Probe
    from rlctl.check.reward_calls import RewardCall

Listed = Mapping[str, Mapping[str, Any]]  # what `roles` tells of each role
PLACEMENT_ROWS = 8  # groups of a role that the table of placement shows; JSON has them all


def _call_table(call: RewardCall) -> Table:
    """Return what a reward function gave the first row, or the end of its traceback."""
    table = Table(box=None, pad_edge=False, title=f"reward {call.path}", title_justify="left", title_style="bold")
    table.add_row("called for", call.row)
    table.add_row("completion", show(call.completion))
    table.add_row("score", call.traceback.strip() if call.score is None else number(call.score))
    return table


def print_findings(findings: Findings, spec_path: Path) -> None:
    """Tables and warnings to stdout, problems to stderr."""
    out = Screen()
    if findings.spec and findings.plan:
        spec_dir, elsewhere = spec_path.absolute().parent, findings.elsewhere
        listed = roles(findings.spec, findings.plan, spec_dir, elsewhere=elsewhere)
        out.print(_roles_table(findings.spec, listed))
        out.print()
        out.print(_attention(findings.spec, spec_dir, elsewhere))
        out.print()
        if (kernels := _kernels(findings.spec, spec_dir, elsewhere)).row_count:
            out.print(kernels)
            out.print()
        if any(findings.spec.role(name).python for name in findings.spec.roles):
            out.print(_interpreters_table(findings.spec, listed))
            out.print()
        if any(_shows_mesh(findings.spec.role(name)) for name in findings.spec.roles):
            out.print(_groups_table(findings.spec))
            out.print()
        if any(findings.spec.role(name).leaves_host for name in findings.spec.roles):
            out.print(_hosts_table(findings.spec, findings.plan))
            out.print()
        for said in _not_known(listed):
            out.print(said, soft_wrap=True)
        out.print(_arithmetic(findings.spec, findings.plan), highlight=True)
        out.print()
        for call in findings.calls:
            out.print(_call_table(call))
            out.print()
        if findings.probe:
            _print_probe(out, findings.spec, spec_dir, findings.probe)
    for note in findings.notes:
        out.print(Text.assemble(("note:", "bold"), f" {note}"), soft_wrap=True)
        out.print()
    print_problems(out, "warning", findings.warnings)
    problems = Screen(stderr=True)
    print_problems(problems, "error", findings.problems)
    if findings.ok:
        out.print(Text.assemble(("ok", "green"), f": {spec_path}"), soft_wrap=True)
    else:
        count = len(findings.problems)
        problems.print(f"{count} problem{'s' if count > 1 else ''} in {spec_path}", soft_wrap=True)


def _print_probe(out: Screen, spec: Spec, spec_dir: Path, found: Probe) -> None:
    from rlctl.check.meta_report import RUN_NOTE, probe_table, run_table

    out.print(probe_table(spec, spec_dir, found))
    out.print()
    if found.level == "run":
        out.print(run_table(found))
        out.print(f"\n{RUN_NOTE}\n")


def _roles_table(spec: Spec, listed: Listed) -> Table:
    table = Table("role", "engine", "model", "dtype", "processes", "devices", "threads", box=None, pad_edge=False)
    for name, role in listed.items():
        path = spec.model_path(name)
        devices = _span(role["devices"]) if role["devices"] else "CPU"
        cells = (role["engine"], path if role["engine"] else "", role["dtype"])
        nodes = f" on {role['nodes']} nodes" if role["nodes"] > 1 else ""
        places = (f"{role['processes']} × {role['launcher']}{nodes}", devices, role["threads"])
        table.add_row(name, *(str(cell or "–") for cell in cells), *map(str, places))
    return table


def _interpreters_table(spec: Spec, listed: Listed) -> Table:
    """Roles that run in another interpreter than ours, and what it has installed."""
    table = Table(box=None, pad_edge=False)
    for column in ("role", "interpreter", "has"):
        table.add_column(column, overflow="fold")
    for name, role in listed.items():
        if spec.role(name).python:
            packages = ", ".join(f"{package} {version}" for package, version in role["versions"].items())
            table.add_row(name, role["python"], packages or "–")
    return table


def _shows_mesh(section: RoleSection) -> bool:
    """Whether ranks hold parts of the model or share samples, or may do so for all that is known."""
    return mesh_of(section) is not None or (section.processes > 1 and not mesh_is_known(section))


def _not_known(listed: Listed) -> list[str]:
    """A paragraph for each role whose engine leaves something open."""
    found = [(name, role) for name, role in listed.items() if role["not_known"]]
    return [
        f"not known of the engine {role['engine']} ({name}), so neither checked nor planned: "
        f"{', '.join(role['not_known'])}; its table may say it ({page('engines.md')})\n"
        for name, role in found
    ]


def _groups_table(spec: Spec) -> Table:
    table = Table("role", "mesh", "group", "ranks", "node", "devices", box=None, pad_edge=False)
    for name in spec.roles:
        section, mesh = spec.role(name), mesh_of(spec.role(name))
        if mesh is None:
            if _shows_mesh(section):
                table.add_row(name, "not known", "", _span(list(range(section.processes))), "", "")
            continue
        meshes = [(_axes(section, mesh), shard_groups(section))]
        if shared := sequence_groups(section):
            of_samples = (f"data {len(shared)} × sequence {mesh.sequence}", shared)
            meshes = [*(meshes if _model_is_cut(section) else []), of_samples]
        for place, (said, groups) in enumerate(meshes):
            _add_groups(table, "" if place else name, said, section, groups)
    return table


def _axes(section: RoleSection, mesh: Mesh) -> str:
    """By the names that the role's engine has for them, where it has others."""
    engine, two = engine_of(section), {"replicate": mesh.replicate, "shard": mesh.shard}
    own = (engine.reported_mesh(section.processes) if engine is not None else None) or {}
    return " × ".join(f"{axis} {ranks}" for axis, ranks in (own if own.keys() - two else two).items())


def _model_is_cut(section: RoleSection) -> bool:
    alone = section.model_copy(update={"sequence_parallel": 1})
    return mesh_of(alone) is not None


def _add_groups(table: Table, role: str, mesh: str, section: RoleSection, groups: Sequence[RankGroup]) -> None:
    shown = groups if len(groups) <= PLACEMENT_ROWS else [*groups[: PLACEMENT_ROWS - 2], groups[-1]]
    for group in shown:
        if group is shown[-1] and len(shown) < len(groups):
            table.add_row("", "", f"… {len(groups) - len(shown)} more")
        whose = (role, mesh) if group is shown[0] else ("", "")
        table.add_row(*whose, *_group_row(group))


def _group_row(group: RankGroup) -> tuple[str, str, str, str]:
    places = []
    for node in group.nodes:
        devices = [device for rank in group.ranks if rank.node == node for device in rank.devices]
        places.append(f"GPU {_span(devices)}" if devices else "CPU")
    nodes = _span(list(group.nodes))
    return str(group.number), _span([rank.rank for rank in group.ranks]), nodes, "; ".join(dict.fromkeys(places))


def _span(numbers: Sequence[int]) -> str:
    """`3`, `0–7`, or, where they have gaps, `0, 2, 5`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first}–{last}"
    return ", ".join(map(str, numbers))


def _reference(spec: Spec) -> str:
    found = reference(spec)
    if not found["loaded"]:
        return str(found["why"])
    where = f"GPU {_span(found['devices'])}" if found["devices"] else "CPU"
    return f"{found['model']} ({found['why']}), held by {found['engine']} on {where}"


def _hosts_table(spec: Spec, plan: Plan) -> Table:
    """Who sits where, host by host."""
    table = Table("host", "role", "ranks", "devices", box=None, pad_edge=False)
    for place in hosts(spec, plan):
        for number_of_role, (role, held) in enumerate(place["roles"].items()):
            devices = f"GPU {_span(held['devices'])}" if held["devices"] else "CPU"
            table.add_row("" if number_of_role else place["host"], role, _span(held["ranks"]), devices)
    return table


def _links(spec: Spec, plan: Plan) -> str:
    """Where the weights go, of replicas that are not all on this host."""
    if not spec.rollout.leaves_host:
        return ""
    ways = [f"{counted(link['replicas'], 'replica')} on {link['host']}" for link in links(spec, plan)]
    shown = (
        ways
        if len(ways) <= PLACEMENT_ROWS
        else [*ways[: PLACEMENT_ROWS - 1], f"{len(ways) - PLACEMENT_ROWS + 1} more hosts"]
    )
    return f"\n       from this host to {', '.join(shown)}"


def _arithmetic(spec: Spec, plan: Plan) -> str:
    numbers = batch(spec)
    cut = f" → {numbers['mini_batches_per_step']} mini-batches of {numbers['samples_per_mini_batch']}"
    epochs = f" × {numbers['epochs_per_step']} epochs" if numbers["epochs_per_step"] > 1 else ""
    transport, why = choose_transport(spec)
    buckets = "" if transport == "shm" else f", in buckets of {spec.sync.bucket_MiB:g} MiB"
    buckets += ", only what changed" if spec.sync.delta else ""
    degree = numbers["sequence_parallel"]
    shared = f",\n       {spec.actor.row_tokens} in a row that {degree} ranks share"
    most = spec.rollout.max_staleness
    ahead = f"\nahead  {_ahead(most)}" if most else ""
    return (
        f"step   {numbers['prompts_per_step']} prompts × {numbers['group_size']} completions = "
        f"{numbers['samples_per_step']} samples{cut if numbers['mini_batches_per_step'] > 1 else ''}{epochs}"
        f"{_besides(spec)}\n"
        f"run    {counted(numbers['steps'], 'step')} = {counted(numbers['optimizer_steps'], 'optimizer step')}"
        f"{_other_learners(spec)}\n"
        f"tokens at most {spec.data.max_prompt_tokens} + {spec.data.max_response_tokens} = "
        f"{numbers['max_sequence_tokens']} in a sequence, {numbers['micro_batch_tokens']} in a forward pass"
        f"{shared if degree > 1 else ''}\n"
        f"ref    {_reference(spec)}\n"
        f"sync   weights travel by {transport} ({why}){buckets}{_links(spec, plan)}"
        f"{ahead}"
    )


def _other_learners(spec: Spec) -> str:
    """Optimizer steps of roles that learn beside the actor."""
    others = [f"{spec.optimizer_steps_of(role)} of the {role}" for role in spec.losses if role != ACTOR]
    return f" of the actor, {', '.join(others)}" if others else ""


def _besides(spec: Spec) -> str:
    """What a step draws besides the samples that it learns from."""
    algorithm = spec.algorithm
    if algorithm.advantage.greedy_baseline:
        return f"\n       and {spec.data.prompts_per_step} greedy completions to compare with"
    if algorithm.dynamic_sampling:
        refills = counted(algorithm.max_refills, "refill")
        return f"\n       groups of equal scores are thrown away, with {refills} at most in a step"
    return ""


def _ahead(most: int) -> str:
    if most == 1:
        return "the next step's samples are drawn while the actor learns: 1 step old; weights travel every step"
    return (
        f"the samples of the next {most} steps are drawn while the actor learns: 1 to {most} steps old; weights travel "
        f"every {most} steps"
    )


def _decisions(on: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("role", f"{on} asked", "in effect", "why"):
        table.add_column(column, overflow="fold")
    return table


def _attention(spec: Spec, spec_dir: Path, elsewhere: bool) -> Table:
    """One row per role that has attention."""
    table = _decisions("attention")
    for role in spec.roles:
        found = role_attention(spec, role, spec_dir, elsewhere=elsewhere)
        if found is not None:
            engine = engine_of(spec.role(role))
            open_ = "not known" if engine is not None and engine.attention is None else "its own"
            effect = "none" if found.problem else found.implementation or open_
            table.add_row(role, found.asked, effect, found.problem or found.why)
    return table


def _kernels(spec: Spec, spec_dir: Path, elsewhere: bool) -> Table:
    """One row per role that asks for other kernels than its model's own modules."""
    table = _decisions("kernels")
    for role in spec.roles:
        found = role_kernels(spec, role, spec_dir, elsewhere=elsewhere)
        if found is not None and found.asked != OWN_MODULES:
            table.add_row(role, found.asked, "none" if found.problem else found.kernels, found.problem or found.why)
    return table
