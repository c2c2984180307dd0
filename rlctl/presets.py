"""`rlctl init`: list presets, and write one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import tomli

import specs
from specs.errors import UsageError
from specs.packages import environments, page
from specs.schema.roles import ROLES
from specs.terminal import json_text

PRESET_FOLDER = Path(specs.__file__).parent / "presets"
BATCH_TEMPLATE = PRESET_FOLDER / "slurm.sbatch"


def presets() -> dict[str, Path]:
    """Return name → file of every preset that ships with rlctl."""
    return {file.stem: file for file in sorted(PRESET_FOLDER.glob("*.toml"))}


def summary(file: Path) -> str:
    """Return the first sentence of a preset's opening comment."""
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        comment.append(line.strip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".")


def runs_on(text: str) -> str:
    """Say where the preset with this text runs."""
    sections = [section for section in tomli.loads(text).values() if isinstance(section, dict)]
    if any(section.get("nodes", 1) > 1 for section in sections):
        return "a cluster"
    return "one node with GPUs" if any("devices" in section for section in sections) else "a laptop"


def print_presets(*, as_json: bool = False) -> None:
    """Print the presets by where they run; "untried" are those that say that they were checked and not run."""
    from rich.table import Table

    from rlctl.show.screen import Screen

    found = []
    for name, file in presets().items():
        text = file.read_text(encoding="utf-8")
        untried = "Checked, not run" in text.partition("\nschema")[0]
        found.append({"preset": name, "runs_on": runs_on(text), "untried": untried, "what": summary(file)})
    if as_json:
        print(json_text(found))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for place in ("a laptop", "one node with GPUs", "a cluster"):
        table.add_row(f"on {place}", style="bold")
        for one in (one for one in found if one["runs_on"] == place):
            table.add_row(f"  {one['preset']}", f"{'(untried) ' * bool(one['untried'])}{one['what']}")
    Screen().print(table)


def batch_script_of(spec: Path) -> Path:
    return spec.with_suffix(".sbatch")


def refuse_existing(target: Path) -> None:
    """Raises UsageError when a file is in the way."""
    if target.exists():
        raise _exists(target)


def write_batch_script(spec: Path, *, force: bool, elsewhere: bool = False) -> Path:
    """Write the SLURM batch script that trains `spec` beside it, with hosts for what learns and for the rollout,
    where it has one; returns the path. Replicas on hosts of their own have those that the actor leaves; else they are
    on each of the actor's.
    `elsewhere`: for other machines, where rlctl's environment is `.venv` beside the spec, if it is not on PATH.

    Raises UsageError when a file is in the way, SpecError when the spec cannot be read.
    """
    from jinja2 import Template

    from specs.load.load import load_spec
    from specs.schema.rank_groups import nodes_of_a_process
    from specs.schema.recipes import sampling_of

    run = load_spec(spec, [])
    if run.cluster is not None and run.cluster.kind == "ray":
        load_spec(spec, ["cluster.kind=slurm"])  # as the script has it: keys for Ray would be refused in the job
    actor, sampling = run.lead_section, sampling_of(run)
    rollout = sampling.rollout if sampling is not None else None
    apart = rollout is not None and rollout.first_node >= actor.nodes
    replicas = ""  # of the rollout's nodes, as the shell computes it
    if rollout:
        span = nodes_of_a_process(rollout)
        replicas = f"/ {span}" if span > 1 else f"* {rollout.processes // rollout.nodes}"
    # Trainers that lie on the actor's hosts, as it does, stay with it.
    sections = {role: run.role(role) for role in run.roles if ROLES[role].is_trainer}
    layout = (actor.nodes, actor.processes)
    trainers = [role for role, section in sections.items() if (section.nodes, section.processes) == layout]
    named = {place for role in run.roles for place in run.gpus(role)}
    far = {place for place in named if apart and rollout and place[0] in rollout.hosts}
    # A host gives GPUs from 0 to the highest number.
    gpus, far_gpus = (max((number for _, number in places), default=-1) + 1 for places in (named - far, far))
    template = Template(BATCH_TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    text = template.render(
        apart=apart,
        trainers=trainers,
        nodes=f"{run.min_nodes}-{actor.nodes}" if run.min_nodes else actor.nodes,
        far_nodes=rollout.nodes if rollout else 0,
        each=actor.processes // actor.nodes,
        replicas=replicas,
        gpus=gpus,
        far_gpus=far_gpus,
        graders=any(ROLES[role].holds == "scorer" and run.role(role).nodes > 1 for role in run.roles),
        spec=shlex.quote(spec.name),
        name=shlex.quote(spec.stem),
        bin='"$PWD/.venv/bin"' if elsewhere else shlex.quote(str(Path(sys.executable).parent)),
        run=shlex.quote(str(run.run.place)),
    )
    target = batch_script_of(spec)
    _write(target, text, force=force)
    return target


def write_preset(name: str, target: Path, *, force: bool, elsewhere: bool = False) -> None:
    """Write preset `name` to `target`. `elsewhere`: for other machines, where no path of this one
    holds. Raises UsageError when there is none, or a file is in the way."""
    known = presets()
    if name not in known:
        from specs.load.keys import closest

        near = closest(name, list(known))
        hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
        raise UsageError(f'--preset "{name}": no such preset', hint=hint)
    text = _with_pages_of_this_installation(known[name].read_text(encoding="utf-8"))
    _write(target, text if elsewhere else _with_interpreters(text, target), force=force)
    for name in dict.fromkeys(re.findall(r'"(\w+\.py):', text)):  # code that it names; what is there already stays
        if (code := PRESET_FOLDER / name).is_file() and not (target.parent / name).exists():
            _write(target.parent / name, code.read_text(encoding="utf-8"), force=False)


def write_translated(source: Path, target: Path, *, force: bool, elsewhere: bool = False, cluster: str) -> None:
    """Write the spec that another tool's file means to `target`, and print what became of each of its keys. `cluster`:
    where several nodes come from. Raises UsageError when it is no such file, or a file is in the way."""
    from rlctl.show.screen import Screen
    from rlctl.show.text_format import columns
    from rlctl.translate.foreign_files import read_foreign
    from rlctl.translate.translation import as_toml, translate

    made = translate(*read_foreign(source), source.name, cluster=cluster)
    text = as_toml(made)
    _write(target, text if elsewhere else _with_interpreters(text, target), force=force)
    screen = Screen(outlives=True)
    for head, rows in ((("translated", "here"), made.translated), (("left out", "why"), made.dropped)):
        if rows:
            screen.print(columns(head, list(rows.values()), left=2) + "\n", soft_wrap=True)
    left = [[key, note] for key, notes in made.notes.items() for note in notes]
    if left:
        screen.print(columns(("left to you", "as a comment there"), left, left=2) + "\n", soft_wrap=True)


def _with_pages_of_this_installation(text: str) -> str:
    """Presets name pages as a clone has them; a wheel has them elsewhere."""
    return re.sub(r"\bdocs/([\w-]+\.md)", lambda found: page(found[1]), text)


def _with_interpreters(text: str, target: Path) -> str:
    """Presets name interpreters of setup-engine as seen from its folder; elsewhere by their full path."""
    folder = environments()
    if target.absolute().parent.resolve() == folder:
        return text
    named = re.compile(r'^python = "(\.venv-[^"]+)"', re.MULTILINE)
    return named.sub(lambda found: f"python = {json.dumps(str(folder / found[1]))}", text)


def _write(target: Path, text: str, *, force: bool) -> None:
    try:
        with open(target, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(target) from None
    except FileNotFoundError:
        hint = f"mkdir -p {shlex.quote(str(target.parent))}"
        raise UsageError(f"{target.parent}: no such folder", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None


def _exists(target: Path) -> UsageError:
    return UsageError(f"{target}: exists already", hint="name another file, or add --force")
