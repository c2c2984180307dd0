"""The command `rlctl plan`: the plan as tables, a picture of each device, what to change; or as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.memory.fit import plan_problems
from rlctl.memory.memory_plan import CONTEXT_GIB, PROCESS_GIB, MemoryPlan, plan_memory
from rlctl.memory.places import Place, RoleMemory
from rlctl.models.hardware import gpu_memory_GiB, host_memory_GiB, usual_gpu_GiB
from specs.errors import Problem, SpecError
from specs.load.load import load_spec
from specs.memory_parts import GIB, Moment, total
from specs.packages import page
from specs.schema.spec import Spec
from specs.terminal import json_text

if TYPE_CHECKING:
    from rich.table import Table

    from rlctl.show.screen import Screen

_BAR = 48  # characters that a device's memory is wide
_USED_SHARE = 0.95  # of a device: allocators leave gaps


def plan_command(
    spec_path: Path,
    overrides: Sequence[str],
    *,
    gpu_GiB: float | None,
    host_GiB: float | None,
    as_json: bool,
    elsewhere: bool = False,
    checked: Callable[[Spec, Path], tuple[Spec, list[Problem]]] = lambda spec, spec_dir: (spec, []),
) -> int:
    """Print the plan. `elsewhere`: for other machines, of which this one says nothing. Returns 0 also when it does not
    fit: that is an answer. `checked`: what puts models in the place of runs. Raises SpecError for a broken spec."""
    notes: list[str] = []
    spec, problems = checked(load_spec(spec_path, list(overrides), notes.append), spec_path.absolute().parent)
    if problems:
        raise SpecError(problems)
    on_gpus = any(spec.role(role).devices for role in spec.roles)
    if on_gpus and gpu_GiB is None:
        gpu_GiB, note = usual_gpu_GiB("this machine is not asked") if elsewhere else gpu_memory_GiB()
        notes.append(note)
    if host_GiB is None:
        # Of GPU machines this one need not be an example.
        unlike = elsewhere or (on_gpus and not shutil.which("nvidia-smi"))
        host_GiB = 0.0 if unlike else host_memory_GiB()
        if host_GiB == 0.0:
            notes.append("memory of the hosts is not known: --host-GiB says it")
    plan = plan_memory(spec, spec_path.absolute().parent, gpu_GiB=gpu_GiB or 0.0, host_GiB=host_GiB)
    problems = plan_problems(spec, plan)
    notes += assumptions(plan)
    if as_json:
        print(json_text(as_dict(plan, problems, notes), indent=2))
    else:
        _print(plan, problems, notes)
    return 0


def assumptions(plan: MemoryPlan) -> list[str]:
    """Return what the numbers rest on."""
    notes = [
        f"what {role.role} holds is not known: the table of the engine {role.engine} has no formula for "
        f"{' and '.join(role.not_known)} ({page('check-config.md')})"
        for role in plan.not_known
    ]
    sources = dict.fromkeys(role.source for role in plan.roles if role.source)
    if not sources:
        return notes
    asleep = {part.nbytes for role in plan.roles for part in role.parts if part.name == "left while asleep"}
    return [
        *notes,
        f"parameters are known from {' and '.join(sources)}; what is marked ~ is estimated ({page('check-config.md')})",
        "activations and logits are those of a full micro-batch, sequences as long as they may be",
        f"a process takes {CONTEXT_GIB:g} GiB of a GPU for its CUDA context, NCCL some more, and {PROCESS_GIB:g} GiB "
        "on the CPU for Python, torch and transformers",
        *(f"a sampler is taken to keep {nbytes / GIB:g} GiB of a GPU while it sleeps" for nbytes in asleep),
        "reward processes, the driver and the system are not counted",
    ]


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def as_dict(plan: MemoryPlan, problems: Sequence[Problem], notes: Sequence[str]) -> dict[str, Any]:
    """Return the plan as JSON; sizes in bytes."""
    return {
        "fits": None if plan.not_known and not problems else not problems,
        "roles": {role.role: _role(role, plan.moments) for role in plan.roles},
        "places": [
            {
                "phases": {phase: place.bytes_in(phase) for phase in plan.moments},
                "roles": place.phases[place.fullest],
                **{name: getattr(place, name) for name in ("kind", "names", "fullest", "memory", "not_known", "fits")},
            }
            for place in plan.places
        ],
        "problems": [{"key": each.key, "message": each.message, "hint": each.hint} for each in problems],
        "assumptions": list(notes),
    }


def _role(role: RoleMemory, moments: Sequence[Moment]) -> dict[str, Any]:
    known = not role.not_known
    return {
        **{name: getattr(role, name) for name in ("engine", "ranks", "device", "not_known")},
        "phases": {phase: total(role.on_device, phase) for phase in moments} if known else None,
        "host_phases": {phase: total(role.on_host, phase) for phase in moments} if known else None,
        "measurable_peak": role.measurable_bytes if known else None,
        "parts": [
            {
                "phases": [phase for phase in moments if phase in part.phases],
                **{"name": part.name, "bytes": part.nbytes, "exact": part.exact, "host": part.host},
            }
            for part in role.parts
        ],
    }


# ── for the person ────────────────────────────────────────────────────────────────────────────────


def _print(plan: MemoryPlan, problems: Sequence[Problem], notes: Sequence[str]) -> None:
    from rlctl.show.screen import Screen

    out = Screen()
    if not plan.roles:
        out.print("fake engines hold no model: there is nothing to plan")
        return
    out.print(_table(plan))
    out.print()
    for place in plan.places:
        _print_place(out, place)
    for problem in problems:
        out.print(f"{problem}\n", soft_wrap=True)
    for note in notes:
        out.print(f"· {note}", style="dim", soft_wrap=True)


def _table(plan: MemoryPlan) -> Table:
    from rich.table import Table

    table = Table("role", "held by", "GiB of one rank", box=None, pad_edge=False)
    for moment in plan.moments:
        table.add_column(moment, justify="right")
    for role in plan.roles:
        where = "GPU" if role.device == "cuda" else "CPU"
        table.add_row(role.role, f"{role.ranks} × {role.engine}, {where}", "", style="bold")
        for part in (part for part in role.parts if part.nbytes >= GIB / 200):
            cells = (f"{part.nbytes / GIB:.2f}" if moment in part.phases else "–" for moment in plan.moments)
            table.add_row("", "", f"{'  ' if part.exact else '~ '}{part.name}{' (host)' if part.host else ''}", *cells)
        for what in role.not_known:
            table.add_row("", "", f"? {what}", *["not known"] * len(plan.moments), style="bold yellow")
        least = "≥ " if role.not_known else ""
        totals = (f"{least}{total(role.on_device, moment) / GIB:.2f}" for moment in plan.moments)
        table.add_row("", "", "  together" + (", on the GPU" if role.device == "cuda" else ""), *totals)
    return table


def _print_place(out: Screen, place: Place) -> None:
    """Print whether a place fits, and a bar of its fullest phase, each role in its own shade."""
    from rich.text import Text

    held = {role: nbytes for role, nbytes in place.phases[place.fullest].items() if nbytes}
    shades = dict(zip(held, cycle("█▓▒░"), strict=False))
    whole = max(place.memory, place.peak, 1)
    bar = "".join(shades[role] * round(_BAR * nbytes / whole) for role, nbytes in held.items()).ljust(_BAR, "·")[:_BAR]
    if place.memory and (edge := round(_BAR * place.memory / whole)) < _BAR:
        bar = f"{bar[:edge]}|{bar[edge:]}"
    parts = "  ".join(f"{shades[role]} {role} {nbytes / GIB:.1f}" for role, nbytes in held.items())
    whose = "" if place.kind == "GPU" else "host memory of "
    out.print(Text.from_markup(f"{whose}{place.name}: {_whether_it_fits(place)}"), soft_wrap=True)
    out.print(f"  {bar}  {place.fullest}: {parts} GiB\n", soft_wrap=True)


def _whether_it_fits(place: Place) -> str:
    """Return words in rich's markup."""
    unknown = f", and what {' and '.join(place.not_known)} holds is not known" if place.not_known else ""
    used = f"{'at least ' if unknown else ''}{place.peak / GIB:.1f}"
    if not place.memory:
        return f"{used} GiB{unknown}"
    if place.fits is False:
        verdict = "[bold red]does not fit[/]"
    elif place.fits is None:
        verdict = "[bold yellow]not known whether it fits[/]"
    else:
        tight = place.peak > _USED_SHARE * place.memory
        verdict = "[bold yellow]fits with nothing to spare[/]" if tight else "[green]fits[/]"
    return f"{verdict}: {used} of {place.memory / GIB:.1f} GiB{unknown}"
