"""`rlctl eval`: evaluate a checkpoint of a run, or a model, on the sets of a spec's `[eval]`. Nothing is trained."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rlctl.loop.driver import StepRecord, UpdateWindow
from rlctl.memory.fit import fit_problems
from rlctl.preflight.file_problems import file_problems
from rlctl.processes.hosts import plan_for_hosts
from rlctl.processes.placement import Plan
from rlctl.run.checkpoints import Checkpoint
from rlctl.run.export import find
from rlctl.run.interrupt import Interrupt
from rlctl.run.lineage import SpecSource, check_held_out, check_same_base, read_own, spec_source
from rlctl.run.resume import check_fits
from rlctl.run.run_dir import RunDir, explained_disk_errors
from rlctl.run.run_exports import export_missing, with_run_exports
from rlctl.run.startup import start
from rlctl.run.train import journaled, open_groups
from rlctl.show import eval_keys
from rlctl.show.journal import EVALUATION, first_day
from rlctl.show.metrics_file import MetricsWriter, append_samples
from rlctl.show.progress import EvalProgress
from rlctl.show.screen import Screen, progress_screen
from rlctl.show.text_format import number, share
from specs.errors import Interrupted, SpecError, UsageError
from specs.load.dotted_keys import value_at
from specs.load.load import load_spec
from specs.schema.algorithms.algorithm_tables import PLAIN
from specs.schema.recipes import RlSpec, RowsSpec, spec_class
from specs.schema.role_section import Lora
from specs.schema.roles import CRITIC, REF
from specs.schema.spec import Spec
from specs.terminal import json_text
from specs.wire import bodies
from specs.wire.messages import Verb

CALLED = {"reward_mean": "mean reward", "length_mean": "mean length", "failed": "not graded"}


def evaluate(
    what: str,
    spec_path: Path | None,
    overrides: Sequence[str],
    *,
    step: int | None = None,
    out: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> Path:
    """Evaluate `what`: the directory of a run, whose own spec stands in where none is named, or a model's folder or
    hub id. Return `out`, or the folder made for it: eval.jsonl, metrics.jsonl, logs. Every failure is an RlctlError."""
    run_dir = Path(what) if (Path(what) / "resolved.json").is_file() else None
    if run_dir is None and spec_path is None:
        hint = f"name a spec with [eval], [data] and [reward]: rlctl eval {shlex.quote(what)} SPEC"
        raise UsageError(f"{what}: not a run directory; to evaluate a model, pass a spec with prompts", hint=hint)
    if run_dir is None and step is not None:
        raise UsageError(f"--step: {what} is a model, not a run", hint="leave it out")
    source = SpecSource(spec_path, spec_path.absolute().parent) if spec_path else spec_source(Path(what), resume=True)
    folder = Path(what).expanduser()
    model = str(folder.absolute()) if folder.exists() else what  # the spec's own paths start elsewhere
    checkpoint = find(run_dir, step) if run_dir else None
    done = checkpoint.step if checkpoint else 0
    if checkpoint is None:
        given = [*overrides, f"model.path={json.dumps(model)}", "model.from_scratch=false"]
    else:
        given = [*(_own_model(checkpoint) if spec_path else ()), *overrides]
    spec = load_spec(source.path, given, lambda note: None)
    if checkpoint is not None and spec.lead not in checkpoint.manifest["roles"]:
        trained = ", ".join(checkpoint.manifest["roles"])
        message = f"{source.path} evaluates a run's {spec.lead}, and {what} trained its {trained}"
        raise UsageError(message, hint="name a spec whose recipe trains that, or leave it out: the run has its own")
    spec, wrong = with_run_exports(spec, source.folder, source.run_dir)
    if wrong:
        raise SpecError(wrong)
    if spec.every is None:
        raise UsageError(f"{source.path} has no [eval]", hint="add it: on what the model is evaluated, and how")
    if run_dir is None and isinstance(spec, RowsSpec) and spec.needs_ref and not spec.own_ref_model:
        message = f"{source.path} compares a model with a reference, which would be the model itself"
        raise UsageError(message, hint="name the model that it started from in ref.model")
    if run_dir is not None:
        check_held_out(run_dir, spec, source.folder)
    spec = without_learning(spec, checkpoint)
    errors, warnings = file_problems(spec, source.folder, starting=True, run_dir=out, saves=False)
    errors += fit_problems(spec, source.folder, here=True)[0]
    if errors:
        raise SpecError(source.explained(errors))
    screen, shown = Screen(outlives=True), progress_screen(as_json=as_json, quiet=quiet)
    export_missing(spec, source.folder, shown)
    if checkpoint is not None:
        check_fits(checkpoint.manifest, spec, source.folder)
    run = RunDir(out or _free(Path(spec.run.dir), Path(what).name, checkpoint))
    plan = plan_for_hosts(spec, source.folder, run.path)
    run.open(spec, source.path, resume=False, spec_dir=source.folder, overrides=given)
    run.journal.note(EVALUATION)
    total = sum(one.samples for one in spec.evaluations)
    try:
        with (
            explained_disk_errors(run.path),
            EvalProgress(Path(what).name, total, shown) as progress,
            journaled(run) as pages,
        ):
            for warning in warnings:
                progress.warning(str(warning))
            record = _measure(run, plan, checkpoint, progress, first_day(run_dir or run.path))
            with MetricsWriter(run.metrics) as metrics:
                metrics.write({"step": done, **record.metrics})
            append_samples(run.evaluations, done, record.samples)
    finally:
        run.release()
    if as_json:
        about = {"model": what, "step": done, "out": str(run.path)}
        print(json_text({**about, "sets": eval_keys.by_set(record.metrics)}))
        return run.path
    screen.print(table(spec, record.metrics))
    for one in spec.evaluations:
        if (passes := one.passes(spec.reward_terms)) is not None:
            screen.print(Text(f"{one.name}: {passes.words}"), soft_wrap=True)
    written = [f"completions: {run.evaluations}"] if spec.generates else []
    screen.print(Text("; ".join([*written, *(f"on a page: {page}" for page in pages)])), soft_wrap=True)
    return run.path


def _own_model(checkpoint: Checkpoint) -> list[str]:
    """Return the overrides that put the model which a run began with in place of another spec's, where it is still
    there."""
    own = read_own(checkpoint.path.parents[1] / "resolved.json")
    path = str(value_at(checkpoint.manifest, ("roles", spec_class(own).lead, "model_path"), ""))
    if not path or (os.path.isabs(path) and not Path(path).is_dir()):
        return []
    scratch = json.dumps(value_at(own, "model.from_scratch", False))
    return [f"model.path={json.dumps(path)}", f"model.from_scratch={scratch}"]


def without_learning(spec: Spec, checkpoint: Checkpoint | None) -> Spec:
    """Return the spec with what an evaluation needs: of reinforcement learning no reference and no critic; one that
    objectives compare with is a model of its own, for the actor has learned. Adapters are those of the `checkpoint`; a
    folder has none."""
    lora = checkpoint.manifest.get("lora", spec.lead_section.lora) if checkpoint else None
    lead = spec.lead_section.model_copy(update={"lora": Lora.model_validate(lora) if lora else None})
    less: dict[str, Any] = {spec.lead: lead, "tracking": ()}
    if isinstance(spec, RlSpec):
        less |= {"algorithm": PLAIN, REF: None, CRITIC: None}
    elif isinstance(spec, RowsSpec) and spec.precomputes_ref:
        less["objective"] = spec.objective.model_copy(update={"precompute_ref": False})
    return spec.model_copy(update=less)


def _free(folder: Path, name: str, checkpoint: Checkpoint | None) -> Path:
    """Choose a directory that is not there yet."""
    name = f"{name}-eval" + (f"-step{checkpoint.step}" if checkpoint else "")
    names = (name if again == 1 else f"{name}-{again}" for again in itertools.count(1))
    return next(folder / one for one in names if not (folder / one).exists())


def _measure(run: RunDir, plan: Plan, checkpoint: Checkpoint | None, progress: EvalProgress, today: str) -> StepRecord:
    done = checkpoint.step if checkpoint else 0
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(progress.message))

        def tick() -> None:
            progress.tick()
            if interrupt.count:
                raise Interrupted(f"interrupted ({interrupt.name})", hint="run it again: its completions were not kept")

        progress.phase("build")
        groups = stack.enter_context(open_groups(run, plan, tick))
        progress.follow(groups.moving)
        driver = start(run, plan, groups, UpdateWindow(), progress, today)
        if checkpoint is not None:
            check_same_base(run.spec, run.as_built, checkpoint)
            lead = run.spec.lead
            groups[lead].call(Verb.LOAD, bodies.Load(folder=str(checkpoint.path / lead)))
            progress.message(f"weights of {checkpoint.path}")
        driver.begin(done)
        return driver.evaluate(done, progress.arrived)


def table(spec: Spec, metrics: Mapping[str, Any]) -> Table:
    """Return a column for each set, a row for each metric."""
    sets = eval_keys.by_set(metrics)
    counts = {one.name: f"{one.prompts} × {one.samples_per_prompt}" for one in spec.evaluations}
    shown = Table("", *sets, box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    if counts:
        shown.add_row("prompts × samples", *(counts.get(name, "–") for name in sets))
    for metric in dict.fromkeys(metric for values in sets.values() for metric in values):
        if metric != "reward_stderr":
            shown.add_row(_called(metric, spec), *(_cell(metric, values) for values in sets.values()))
    return shown


def _called(metric: str, spec: Spec) -> str:
    """Name a metric for a person; `term_0` says which term that is."""
    index = metric.removeprefix("term_")
    if index == metric or not index.isdecimal():
        return CALLED.get(metric, metric)
    term = spec.reward_terms[int(index)]
    return f"term {index}, {getattr(term, 'path', term.kind)}"


def _cell(metric: str, values: Mapping[str, float]) -> str:
    if metric not in values:
        return "–"
    if metric == eval_keys.MEAN:
        return f"{number(values[metric])} ± {number(values.get('reward_stderr'), 2)}"
    return share(values[metric]) if metric == "finished" else number(values[metric])
