"""The command line as a person meets it: exit codes, what is said, and what is never touched."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import running
from running import listing

from rlctl.cli import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def rlctl(*arguments: str, cwd: Path) -> Done:
    """Run the command line in `cwd`, in this process; what `python -m rlctl` adds is tested apart."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("module", ["typer", "rlctl.show.streams", "specs.errors"])
def test_ctrl_c_while_it_is_imported_ends_without_a_traceback(module: str) -> None:
    code = "import os, signal, sys, time\nclass Finder:\n def find_spec(self, name, *_):\n"
    code += f"  if name == {module!r}: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
    code += "sys.meta_path.insert(0, Finder())\nfrom rlctl.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_while_pydantic_builds_validators_is_no_fault_of_ours(tmp_path: Path) -> None:
    """It makes a SchemaError of whatever is raised in what it asks, here how a choice is shown."""
    code = "import os, signal, sys\nfrom enum import Enum\nimport pydantic\nfrom typing import Literal\n"
    code += "class Choice(Enum):\n A = 1\n def __repr__(self): os.kill(os.getpid(), signal.SIGINT)\n"
    code += "def runs(*_, **__): pydantic.create_model('M', a=Literal[Choice.A])\n"
    code += "import rlctl.run.runs_command as it\nit.runs = runs\n"
    code += "from rlctl.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_init_writes_a_spec_that_passes_and_never_overwrites(tmp_path: Path) -> None:
    done = rlctl("init", "spec.toml", "--preset", "quickstart", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rlctl("check-config", "spec.toml", cwd=tmp_path).returncode == 0
    (tmp_path / "spec.toml").write_text("mine")
    again = rlctl("init", "spec.toml", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert "\n\nhint: name another file, or add --force" in again.stderr
    assert (tmp_path / "spec.toml").read_text() == "mine"
    assert rlctl("init", "spec.toml", "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "spec.toml").read_text().startswith("# A tiny model")


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("rlctl che", {"check-config"}),
        ("rlctl init --preset quick", {"quickstart"}),
        ("rlctl train a.toml --set actor.optimizer.l", {"actor.optimizer.lr"}),
        ("rlctl sweep a.toml --set run.se", {"run.seed"}),
    ],
)
def test_the_shell_completes_commands_presets_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begun: str, offered: set[str]
) -> None:
    asked = {"_RLCTL_COMPLETE": "complete_bash", "COMP_WORDS": begun, "COMP_CWORD": str(len(begun.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):  # the shell's process ends there
        main([])
    assert set(capsys.readouterr().out.split()) == offered


def test_init_names_presets(tmp_path: Path) -> None:
    listed = rlctl("init", "--list", cwd=tmp_path)
    assert listed.returncode == 0
    for name in ("quickstart", "gsm8k-cpu", "grpo-1gpu"):
        assert name in listed.stdout
    laptop, node, cluster = re.split("on one node with GPUs|on a cluster", listed.stdout)
    assert "quickstart" in laptop
    assert "(untried)" not in laptop
    assert "sft-8gpu" in node
    assert "megatron-70b-64gpu" in cluster
    as_json = {one["preset"]: one for one in json.loads(rlctl("init", "--list", "--json", cwd=tmp_path).stdout)}
    assert (as_json["grpo-1gpu"]["runs_on"], as_json["grpo-1gpu"]["untried"]) == ("one node with GPUs", False)
    unknown = rlctl("init", "--preset", "quickstrat", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean quickstart?" in unknown.stderr
    nowhere = rlctl("init", "no such/spec.toml", cwd=tmp_path)
    assert (nowhere.returncode, "no such folder\n\nhint: mkdir -p 'no such'\n" in nowhere.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_spec_is_exit_2_with_every_problem_and_no_traceback(tmp_path: Path) -> None:
    rlctl("init", "spec.toml", cwd=tmp_path)
    text = (
        (tmp_path / "spec.toml")
        .read_text()
        .replace("group_size = 16", "group_sizes = 16")
        .replace("steps = 100", 'steps = "100"')
    )
    (tmp_path / "spec.toml").write_text(text)
    for arguments in (("check-config",), ("train",), ("train", "--dry-run")):
        before = listing(tmp_path)
        done = rlctl(*arguments, "spec.toml", cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert (
            'error: run.steps = "100": must be a whole number, not text\n\nhint: write it without quotes' in done.stderr
        )
        assert "error: algorithm.group_sizes = 16: unknown key\n\nhint: did you mean `group_size`?" in done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        assert listing(tmp_path) == before


def test_export_refuses_options_it_does_not_know(tmp_path: Path) -> None:
    done = rlctl("export-checkpoint", "run", "out", "--dtype", "fp8", cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for '--dtype'" in done.stderr
    lacking = rlctl("eval", "some/model", cwd=tmp_path)
    assert lacking.returncode == 2
    assert "name a spec with [eval], [data] and [reward]: rlctl eval some/model SPEC" in lacking.stderr
    of_options = (("train", "a.toml", "--run-dir", ""), ("eval", "run", "--out", ""))
    of_arguments = (("plan", ""), ("runs", ""), ("report", "run", ""), ("export-checkpoint", "run", ""))
    for words in (*of_options, *of_arguments):
        assert "the path is empty" in rlctl(*words, cwd=tmp_path).stderr
    missing = rlctl("export-checkpoint", "run", "out", cwd=tmp_path)
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_every_role_and_touches_nothing(tmp_path: Path) -> None:
    rlctl("init", "spec.toml", cwd=tmp_path)
    before = listing(tmp_path)
    settings = ("--set", "actor.processes=2", "--set", "actor.launcher=torchrun", "--set", "rollout.processes=2")
    done = rlctl("train", "spec.toml", "--dry-run", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "[reward] 1 process on CPU",
        "[rollout] 2 processes on CPU",
        "-m workers.main --role rollout    (× 2)",
        "-m backends.torchrun --rdzv-endpoint '127.0.0.1:{port}' --nproc-per-node 2 -m workers.main --role actor\n",
        "OMP_WAIT_POLICY=PASSIVE",
    ):
        assert text in done.stdout, done.stdout
    assert listing(tmp_path) == before


@pytest.mark.usefixtures("warm_children")
def test_a_run_keeps_a_spec_that_comes_through_a_pipe_and_a_dry_run_shows_its_resume(tmp_path: Path) -> None:
    rlctl("init", "spec.toml", "--preset", "fake", cwd=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", "cat spec.toml > pipe"], cwd=tmp_path):
        trained = rlctl("train", "pipe", "--set", "run.steps=1", "--run-dir", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "spec.toml").unlink()
    before = listing(tmp_path)
    dry = rlctl("train", "run", "--resume", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "[rollout] 1 process on CPU" in dry.stdout
    assert listing(tmp_path) == before
    resumed = rlctl("train", "run", "--resume", "--set", "run.steps=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 2/2" in resumed.stdout + resumed.stderr


def test_ctrl_c_is_exit_130_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("rlctl.run.runs_command.runs", interrupted)
    assert rlctl("runs", cwd=tmp_path) == Done(130, "", "interrupted\n")


def test_a_fault_of_ours_is_exit_1_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.presets.print_presets", lambda **_: 1 / 0)
    done = rlctl("init", "--list", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "error: ZeroDivisionError: division by zero\n\nhint: this is a fault in rlctl" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("runs", "x" * 300), ("check-config", "spec.toml", "--set", f"data.train={'x' * 300}.jsonl")],
)
def test_a_path_that_the_file_system_refuses_is_bad_input(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    rlctl("init", "spec.toml", "--preset", "fake", cwd=tmp_path)
    done = rlctl(*arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    said = "holds no runs" if arguments[0] == "runs" and sys.version_info >= (3, 13) else "cannot be used: "
    assert f"{arguments[-1].rpartition('=')[2]} {said}" in done.stderr


def test_a_full_disk_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlctl.presets.print_presets", full)
    assert main(["init", "--list"]) == 1
    assert "error: output cannot be written: the disk is full\n" in capsys.readouterr().err


HEAVY = ("torch", "transformers", "numpy", "zmq", "safetensors", "pyarrow")


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("check-config", "spec.toml"), ("plan", "spec.toml"), ("train", "spec.toml", "--dry-run")],
)
def test_light_commands_import_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    rlctl("init", "spec.toml", cwd=tmp_path)
    loaded = f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    code = f"import sys; from rlctl.cli import main; main(); {loaded}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.stderr.strip().endswith("[]"), done.stderr


def test_version_and_module(tmp_path: Path) -> None:
    from rlctl import __version__

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments, code in (("--version", 0), ("nonsense", 2)):
        command = [sys.executable, "-m", "rlctl", arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == code, done.stderr
        assert code or re.fullmatch(rf"rlctl {__version__} \((commit \w+, )?extras: [\w, -]+\)", done.stdout.strip())


@pytest.mark.parametrize("name", ["workers.py", "specs/__init__.py"])
def test_a_file_that_stands_in_for_a_package_of_ours_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    done = running.rlctl("--version", cwd=tmp_path)
    assert done.returncode == 1
    package = name.partition("/")[0].removesuffix(".py")
    said = f"rlctl needs its own package `{package}`, and Python finds {tmp_path / name}: rename that"
    assert said in done.stderr.splitlines()[-1]


def test_for_a_cluster_what_is_missing_here_is_a_note(tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    spec = "spec.toml"
    made = rlctl("init", spec, "--preset", "grpo-8gpu-separate", "--target", "cluster", cwd=tmp_path)
    assert "next: rlctl check-config spec.toml --target cluster\n" in made.stdout
    done = rlctl("check-config", spec, "--target", "cluster", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for key in ("rollout.python", "actor.devices", "model.path", "data.train"):
        assert f"note: not on this machine: {key} = " in done.stdout
    theirs = ("--set=model.path=/of/the/cluster",)
    here = rlctl("check-config", spec, *theirs, cwd=tmp_path)
    assert (here.returncode, "error: model.path = " in here.stderr) == (2, True)
    assert rlctl("check-config", spec, "--target", "cluster", *theirs, cwd=tmp_path).returncode == 0
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    dry = rlctl("train", spec, "--dry-run", "--target", "cluster", cwd=tmp_path)
    assert (dry.returncode, "hf_secret" in dry.stdout) == (0, False), dry.stderr
    refused = rlctl("train", spec, "--target", "cluster", cwd=tmp_path)
    assert (refused.returncode, "only with --dry-run" in refused.stderr) == (2, True)
