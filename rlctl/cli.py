"""Parse the command line. Each command imports what it needs when it is called, so that `--help` answers at once."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from rlctl.show.streams import visible_streams
from specs.errors import Interrupted, Problem, RlctlError, SpecError, UsageError

F = TypeVar("F", bound=Callable[..., Any])
Option, Argument = (partial(kind, show_default=False) for kind in (typer.Option, typer.Argument))

app = typer.Typer(
    name="rlctl",
    help="Post-train language models: RL, SFT, preferences, reward models. One TOML file says everything about a run.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich help pulls in a Markdown parser: twice the time of everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, example: str, **options: Any) -> Callable[[F], F]:
    """Register a command whose help ends with an example."""
    return app.command(name, epilog=f"Example: rlctl {example}", **options)


def _complete_key(begun: str) -> list[str]:
    """Return keys of a spec, for the shell's completion."""
    from specs.load.keys import leaves

    return [key for key in leaves() if key.startswith(begun)]


def _complete_preset(begun: str) -> list[str]:
    from rlctl.presets import presets

    return [name for name in presets() if name.startswith(begun)]


def _path(text: str) -> Path:
    """Refuse the empty path of an unset variable, which Python takes for the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


PathOption, PathArgument = (partial(kind, parser=_path) for kind in (Option, Argument))
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress: the result alone, and errors.")]
SpecFile = Annotated[Path, PathArgument(metavar="SPEC", help="The run spec, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY=VALUE", help="Change a key, e.g. run.steps=10. Repeatable.", autocompletion=_complete_key
    ),
]


class Machine(StrEnum):
    """Say where a run will be."""

    here = "here"
    cluster = "cluster"


TargetMachine = Annotated[
    Machine,
    typer.Option(
        "--target", help="cluster: the run is for other machines; what this one lacks is a note, not an error."
    ),
]


def _version(asked: bool) -> None:
    if asked:
        from rlctl.version import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version, commit and extras.")
    ] = False,
) -> None:
    pass


@command("init", "init my.toml --preset gsm8k-cpu")
def init(
    spec: Annotated[Path | None, PathArgument(metavar="SPEC", help="File to write; default: PRESET.toml.")] = None,
    preset: Annotated[
        str, Option(help="Which preset to write; default: quickstart.", autocompletion=_complete_preset)
    ] = "",
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    launcher: Annotated[
        Literal["slurm"] | None,
        Option(help="slurm: write a batch script beside the spec too. Without --preset a SPEC that exists is kept."),
    ] = None,
    target: TargetMachine = Machine.here,
    source: Annotated[
        Path | None,
        Option(
            "--from",
            metavar="FILE",
            help="Translate a TRL script or YAML, a verl YAML or shell script, or a prime-rl TOML. Nothing is run.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as one JSON list.")] = False,
) -> None:
    """Write a commented spec to start from: a preset, or another tool's file in rlctl's keys."""
    from rlctl import presets

    if list_presets:
        presets.print_presets(as_json=as_json)
        return
    if source is not None and preset:
        raise UsageError("--from and --preset exclude each other", hint="leave one out")
    path = spec or Path(f"{preset or (source.stem if source else 'quickstart')}.toml")
    if source is not None and path.resolve() == source.resolve():
        raise UsageError(f"{path}: is the file that --from reads", hint="name another SPEC to write")
    if launcher and not force:
        presets.refuse_existing(presets.batch_script_of(path))  # before the spec is written: both or neither
    elsewhere = target == Machine.cluster
    if source is not None:
        presets.write_translated(source, path, force=force, elsewhere=elsewhere, cluster=launcher or "ray")
        typer.echo(f"wrote {path}")
    elif not (launcher and not preset and path.exists()):
        presets.write_preset(preset or "quickstart", path, force=force, elsewhere=elsewhere)
        typer.echo(f"wrote {path}")
    quoted = shlex.quote(str(path))
    starts = f"rlctl train {quoted}"
    if launcher:
        script = presets.write_batch_script(path, force=force, elsewhere=elsewhere)
        typer.echo(f"wrote {script}")
        starts = f"sbatch {shlex.quote(str(script))}"
    there = " --target cluster" if elsewhere else ""
    typer.echo(f"\nnext: rlctl check-config {quoted}{there}\n      {starts}")


@command("check-config", "check-config my.toml --set run.steps=10")
def check_config(
    spec: SpecFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    target: TargetMachine = Machine.here,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Build every role's model without memory, in its own interpreter, and compare it with the spec.",
        ),
    ] = False,
) -> None:
    """Explain a spec and list everything wrong with it. Needs no GPU, changes nothing."""
    from rlctl.check.check_command import check

    raise typer.Exit(
        check(spec, overrides or [], as_json=as_json, strict=strict, elsewhere=target == Machine.cluster, probed=probe)
    )


@command("train", "train my.toml --set actor.optimizer.lr=1e-5")
def train(
    spec: SpecFile,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, PathOption(metavar="DIR", help="Run directory; default: run.dir/run.name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of the run.")] = False,
    accept_changed_files: Annotated[
        bool,
        typer.Option(
            "--accept-changed-files",
            help="With --resume: continue although data, reward or tokenizer files have changed. Recorded.",
        ),
    ] = False,
    fork_of: Annotated[
        str,
        Option(
            "--from",
            metavar="RUN_DIR[@STEP]",
            help="Begin with the weights and optimizer state of another run, after its newest checkpoint or that STEP.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, role by role.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    target: TargetMachine = Machine.here,
) -> None:
    """Train. With --resume, SPEC may be a run directory, whose own spec is then used."""
    if dry_run:
        from rlctl.check.dry_run import dry_run as show_plan

        show_plan(spec, overrides or [], resume=resume, elsewhere=target == Machine.cluster)
        return
    if target == Machine.cluster:
        raise UsageError("--target cluster: only with --dry-run", hint="train starts its roles from here")
    from rlctl.run.train import print_result
    from rlctl.run.train import train as run
    from rlctl.show.screen import progress_screen

    screen = progress_screen(as_json=as_json, quiet=quiet)
    accepted = accept_changed_files
    done = run(spec, overrides or [], run_dir, resume, accepted, fork_of=fork_of, screen=screen)
    print_result(done, as_json=as_json)


@command("eval", "eval runs/NAME --set eval.prompts=200", short_help="Evaluate a checkpoint or a model.")
def evaluate(
    what: Annotated[str, Argument(metavar="RUN_DIR|MODEL", help="Directory of a run, or a model's folder or hub id.")],
    spec: Annotated[
        Path | None, PathArgument(metavar="SPEC", help="Spec with [eval], [data] and [reward]; default: the run's own.")
    ] = None,
    overrides: Overrides = None,
    step: Annotated[int | None, Option(min=0, help="Checkpoint of the run; default: the newest.")] = None,
    out: Annotated[Path | None, PathOption(metavar="DIR", help="Folder to write; default: below run.dir.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a checkpoint or a model on the sets of [eval], and train nothing."""
    from rlctl.run.evaluate import evaluate as run

    run(what, spec, overrides or [], step=step, out=out, as_json=as_json, quiet=quiet)


@command("serve", "serve runs/NAME --port 8000", short_help="Serve a checkpoint or a model to agents' clients.")
def serve(
    what: Annotated[str, Argument(metavar="RUN_DIR|MODEL", help="Directory of a run, or a model's folder or hub id.")],
    step: Annotated[int | None, Option(min=0, help="Checkpoint of the run; default: the newest.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines can connect only with --key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Default: a free one.")] = 0,
    key: Annotated[
        str,
        Option(envvar="RLCTL_SERVE_KEY", help="API key to require; default: any key, each with its own conversations."),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Conversations, as rows for sft.")] = Path("served.jsonl"),
    context: Annotated[int, Option(min=0, help="Most tokens of a conversation; default: up to 8192.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token.")] = 1.0,
    engine: Annotated[Literal["torch", "vllm"], typer.Option(help="vllm: with an interpreter that has it.")] = "torch",
    python: Annotated[
        str, Option(metavar="FILE", help="Interpreter that samples, such as .venv-vllm/bin/python.")
    ] = sys.executable,
    gpu: Annotated[bool, typer.Option("--gpu", help="Sample on the first GPU, in bf16.")] = False,
) -> None:
    """Answer OpenAI's and Anthropic's clients as in training, and keep the conversations to learn from."""
    from rlctl.run.serve_command import serve as run

    served = partial(run, what, out, step=step, host=host, port=port, key=key, context=context)
    raise typer.Exit(served(temperature=temperature, engine=engine, python=python, gpu=gpu))


@command(
    "sweep", "sweep my.toml --set run.seed=0,1,2 --jobs 2", short_help="Train once for every combination of values."
)
def sweep(
    spec: SpecFile,
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE[,VALUE…]",
            help="Change a key in all runs; several values make a run for each, in all combinations. Repeatable.",
            autocompletion=_complete_key,
        ),
    ] = None,
    folder: Annotated[
        Path | None, PathOption("--dir", metavar="DIR", help="Folder of the runs; default: run.dir/NAME-sweep.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and start none.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train once for every combination of values, and rank the runs. The same call again continues the sweep."""
    from rlctl.run.sweep import sweep as run

    raise typer.Exit(run(spec, overrides or [], folder, jobs, dry_run, as_json=as_json, quiet=quiet))


@command("plan", "plan my.toml --gpu-GiB 80", short_help="Estimate the memory of each role.")
def plan(
    spec: SpecFile,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None,
        Option("--gpu-GiB", min=0.01, max=1e9, help="Memory of each GPU. Default: as nvidia-smi says, else 80."),
    ] = None,
    host_gib: Annotated[
        float | None, Option("--host-GiB", min=0.01, max=1e9, help="Memory of each host. Default: this one's.")
    ] = None,
    as_json: AsJson = False,
    target: TargetMachine = Machine.here,
) -> None:
    """Estimate the memory of each role in each phase, and whether it fits. Needs no GPU, only config.json."""
    from rlctl.memory.plan_command import plan_command
    from rlctl.run.run_exports import with_run_exports

    planned = partial(plan_command, spec, overrides or [], elsewhere=target == Machine.cluster)
    raise typer.Exit(planned(gpu_GiB=gpu_gib, host_GiB=host_gib, as_json=as_json, checked=with_run_exports))


@command("report", "report runs/NAME runs/OTHER", short_help="Write the page of a run, or compare runs.")
def report(
    run_dirs: Annotated[list[Path], PathArgument(metavar="RUN_DIR...", help="Directories of runs.")],
    out: Annotated[
        Path | None,
        PathOption(
            metavar="FILE",
            help="Page to write; default: report.html in the run directory, comparison.html here for several.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the page of a run, even while it runs; of several runs, a page that compares them."""
    from rlctl.run.report_command import report as write

    write(run_dirs, out, as_json=as_json)


@command("runs", "runs runs", short_help="List runs with recipe, state, step and reward.")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=_path, help="Folder of runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder with recipe, state, step, reward and when they last wrote."""
    from rlctl.run.runs_command import runs

    raise typer.Exit(runs(folder, as_json=as_json))


@command(
    "export-checkpoint", "export-checkpoint runs/NAME exports/NAME", short_help="Turn a checkpoint into a model folder."
)
def export_checkpoint(
    run_dir: Annotated[Path, PathArgument(metavar="RUN_DIR", help="Directory of a run.")],
    out_dir: Annotated[Path, PathArgument(metavar="OUT_DIR", help="Model folder to write.")],
    step: Annotated[int | None, Option(min=0, help="Step to export; default: the newest.")] = None,
    role: Annotated[
        Literal["actor", "critic", "reward_model"] | None,
        Option(help="Role to export; default: the one that was trained."),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None,
        Option(help="Default: what the base model's config.json says, else what the run trained in."),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option("--shard-GB", min=0.001, max=1e6, help="Largest weight file to write, in GB.")
    ] = 2.0,
    memory_gib: Annotated[
        float | None,
        Option(
            "--memory-GiB",
            min=0.01,
            max=1e9,
            help="Memory that the proof may load the model into; a larger one is run from the disk. "
            "Default: half of what is free.",
        ),
    ] = None,
    adapter_only: Annotated[
        bool,
        typer.Option(
            "--adapter-only", help="Export only the LoRA adapters, as a folder for peft; else they are merged."
        ),
    ] = False,
    push_to_hub: Annotated[
        str | None,
        Option(
            "--push-to-hub",
            metavar="NAME",
            help="Push the folder to this repository on the Hugging Face hub, OWNER/NAME; made private if it is new.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push-to-hub: make the repository public.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn a checkpoint into a model folder that transformers loads, and prove that it does."""
    from rlctl.models.run_export import NOTE
    from rlctl.run.export import export
    from rlctl.show.screen import progress_screen

    exported = partial(export, run_dir, out_dir, step, role or "", dtype, shard_GB=shard_gb, memory_GiB=memory_gib)
    pushed = partial(exported, adapter_only=adapter_only, push_to_hub=push_to_hub, public=public)
    code = pushed(screen=progress_screen(as_json=as_json, quiet=quiet))
    if as_json:
        print((out_dir / NOTE).read_text(encoding="utf-8").strip())
    raise typer.Exit(code)


@command("setup-engine", "setup-engine vllm", short_help="Add an engine that is not there yet.")
def setup_engine(
    name: Annotated[str, Argument(metavar="NAME", help="What to add: deepspeed, megatron or vllm.")],
) -> None:
    """Add an engine that is not part of the plain installation. A second call finishes what was interrupted.

    deepspeed is installed beside rlctl; the others get environments of their own, .venv-NAME: in the clone that rlctl
    runs from, else in the current folder.
    """
    import os
    import shutil

    from specs.packages import setup_script

    if not name.isascii() or not name.isalpha():
        raise UsageError(f'no engine is called "{name}"', hint="it adds deepspeed, megatron or vllm")
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("setup-engine needs bash, and PATH leads to none", hint="install it, and call this again")
    os.execve(bash, [bash, str(setup_script()), name], {**os.environ, "RLCTL_INTERPRETER": sys.executable})


pressed: list[int] = []


def interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt, and note it: pydantic, while it builds validators, makes another error of it."""
    pressed.append(number)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    with visible_streams():
        return _main(arguments)


def _main(arguments: list[str] | None) -> int:
    try:
        code = int(app(arguments, prog_name="rlctl", standalone_mode=False) or 0)
    except RlctlError as error:
        show_error(error)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = Interrupted.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone; so would a second message
        return 1
    except Exception as error:  # the edge: nothing may pass, and the traceback is kept
        code = _show_usage(error) or _show_refused(error) or (Interrupted.exit_code if pressed else _show_bug(error))
    if code == Interrupted.exit_code:  # as typer returns of a Ctrl-C
        print("interrupted", file=sys.stderr)
    return code


def show_error(error: RlctlError) -> None:
    """Print the error, or all problems of a spec. The exit code must not depend on who still listens."""
    from rlctl.show.problems import print_problems
    from rlctl.show.screen import Screen

    problems = error.problems if isinstance(error, SpecError) else [Problem("", error.message, error.hint)]
    if sys.stderr is not None:
        print_problems(Screen(stderr=True, outlives=True), "error", problems)


def _show_usage(error: Exception) -> int:
    """Show a wrong command line and return its exit code; 0 for any other error. Typer has a copy of click's errors."""
    show = getattr(error, "show", None)
    if not callable(show):
        return 0
    show()
    return int(getattr(error, "exit_code", 2))


def _show_refused(error: Exception) -> int:
    """Show what the file system refuses and return the exit code; 0 for any other error."""
    import errno as e

    if not isinstance(error, OSError):
        return 0
    if error.errno in (e.ENOSPC, e.EDQUOT):
        known = RlctlError(f"{error.filename or 'output'} cannot be written: the disk is full", hint="free some space")
    elif error.filename and error.errno in (
        e.EACCES, e.EPERM, e.EROFS, e.EEXIST, e.ENOTDIR, e.EISDIR, e.ENAMETOOLONG
    ):  # fmt: skip
        hint = "see what stands there and who may use it, or name another path"
        known = UsageError(f"{error.filename} cannot be used: {error.strerror}", hint=hint)
    else:
        return 0
    show_error(known)
    return known.exit_code


def _show_bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    hint = "this is a fault in rlctl; please report it with the lines above"
    show_error(RlctlError(f"{type(error).__name__}: {error}", hint=hint))
    return 1
