"""The manifest of `rlctl init --launcher kubernetes`: the placement of the spec, names, and shell that runs.

`test_hosts.py` runs a driver's script among network namespaces.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from running import preset
from typer.main import get_command

from rlctl.cli import Machine, app, init
from rlctl.presets import write_manifest
from rlctl.processes.jobset import manifest_name, pods_of
from rlctl.processes.placement import make_plan
from specs.errors import UsageError
from specs.load.load import load_spec

yaml = importlib.import_module("yaml")  # comes with transformers

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def jobs_in(file: Path) -> dict[str, Any]:
    """Return the jobs of a manifest's JobSet, by name."""
    jobset = [*yaml.safe_load_all(file.read_text())][-1]
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def pod_of(job: Any) -> Any:
    return job["template"]["spec"]["template"]["spec"]


def container_of(job: Any) -> Any:
    return pod_of(job)["containers"][0]


def gpus_of(job: Any) -> int:
    return int(container_of(job).get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def written(folder: Path, name: str, rollout: str = "", spec_name: str = "") -> tuple[Path, Path]:
    """A preset with more under [rollout], and its manifest."""
    spec = preset(name, folder)
    text = spec.read_text()
    if rollout:
        head, section, rest = re.split(r"(?m)^\[rollout\]\n((?:(?!\[).*\n?)*)", text, maxsplit=1)
        new = {line.split()[0] for line in rollout.splitlines()}
        kept = [line for line in section.splitlines(keepends=True) if (line.split() or [""])[0] not in new]
        text = f"{head}[rollout]\n{rollout}{''.join(kept)}{rest}"
        text += "" if "[cluster]" in text else '\n[cluster]\nhostfile = "hosts"\n'
    spec = folder / (spec_name or spec.name)
    spec.write_text(text)
    return spec, write_manifest(spec, force=False)


def run_bash(*words: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "rollout", "pods"),
    [
        ("quickstart", "", {"driver": (1, 0)}),
        ("fsdp2-8gpu", "", {"driver": (1, 8)}),
        ("quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n", {"samplers": (2, 0), "driver": (1, 0)}),
        (
            "megatron-70b-64gpu",
            "processes = 2\nfirst_node = 8\nnodes = 2\n",
            {"trainers": (7, 8), "samplers": (2, 8), "driver": (1, 8)},
        ),
    ],
)
def test_pods_and_gpus_are_those_of_the_spec_and_the_driver_knows_them_as_its_hosts(
    tmp_path: Path, name: str, rollout: str, pods: dict[str, tuple[int, int]]
) -> None:
    spec_file, file = written(tmp_path, name, rollout)
    jobs = jobs_in(file)
    assert {name: (job["replicas"], gpus_of(job)) for name, job in jobs.items()} == pods
    before = [job["dependsOn"][0]["name"] for job in jobs.values() if "dependsOn" in job]
    assert before == [*pods][:-1], "the driver comes last"
    spec = load_spec(spec_file)
    gpus = {gpu for role in spec.roles for gpu in spec.gpus(role)}
    assert sum(job["replicas"] * gpus_of(job) for job in jobs.values()) == len(gpus)

    arguments = arguments_from(container_of(jobs["driver"])["command"], tmp_path)
    overrides = [after for flag, after in pairwise(arguments) if flag == "--set"]
    plan = make_plan(load_spec(spec_file, overrides), tmp_path)
    label = manifest_name(spec_file)
    made = {f"{label}-{job}-{index}" for job, (count, _) in pods.items() for index in range(count)}
    assert set(plan.hosts) == made - {f"{label}-driver-0"}
    for node in (node for role in plan.roles for node in role.remote):
        assert node.shell == ("kubectl", "exec", "-i", f"job/{node.host}", "--", "sh")


def arguments_from(command: Sequence[str], folder: Path) -> list[str]:
    """What a driver's script tells rlctl, where claim and ConfigMap are `folder`."""
    assert command[:2] == ["bash", "-c"]
    (folder / "spec.toml").touch()
    script = command[2].replace("/shared", str(folder)).replace("/etc/rlctl", str(folder))
    prints = f'rlctl() {{ printf "%s\\n" "$@"; }}; cd {folder}; POD_IP=10.0.0.7\n'
    program = prints + script.replace("exec rlctl", "rlctl")
    done = run_bash("bash", text=program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_shell_in_pods_is_right_and_calls_rlctl_as_it_is(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n")
    for job in jobs_in(file).values():
        shell, option, script = container_of(job)["command"]
        assert option == "-c"
        assert run_bash(shell, "-n", text=script).returncode == 0
    command, spec, *options = arguments_from(container_of(jobs_in(file)["driver"])["command"], tmp_path)
    assert (command, spec) == ("train", "rlctl-quickstart.toml")
    known = {name for parameter in get_command(app).commands["train"].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {word for word in options if word.startswith("--")} <= known
    run = Path(options[options.index("--run-dir") + 1])
    run.mkdir(parents=True)
    (run / "resolved.json").touch()  # `RunDir.resolved`
    again = arguments_from(container_of(jobs_in(file)["driver"])["command"], tmp_path)
    assert again == [command, spec, *options, "--resume"], "a run on the claim is resumed"


@pytest.mark.parametrize("spec_name", ["My run.toml", "7b.toml", f"{'x' * 80}.toml", "_._.toml"])
def test_any_spec_has_names_that_kubernetes_takes(tmp_path: Path, spec_name: str) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n", spec_name=spec_name)
    label = next(yaml.safe_load_all(file.read_text()))["metadata"]["name"]
    for name, job in jobs_in(file).items():
        assert LABEL.fullmatch(f"{label}-{name}-{job['replicas'] - 1:03}-0"), "a pod's host name"
        assert pod_of(job)["volumes"][0]["persistentVolumeClaim"]["claimName"] == label


def test_only_the_driver_may_enter_pods_and_only_where_there_are_others(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n")
    accounts = {name: pod_of(job).get("serviceAccountName") for name, job in jobs_in(file).items()}
    assert accounts == {"samplers": None, "driver": manifest_name(tmp_path / "quickstart.toml")}
    assert pod_of(jobs_in(file)["samplers"])["automountServiceAccountToken"] is False
    alone = write_manifest(preset("fake", tmp_path), force=False)
    kinds = [one["kind"] for one in yaml.safe_load_all(alone.read_text())]
    assert kinds == ["PersistentVolumeClaim", "NetworkPolicy", "JobSet"]


def test_specs_that_pods_cannot_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no role is on host 2 of 4"):
        written(tmp_path, "quickstart", "processes = 2\nfirst_node = 2\nnodes = 2\n")
    spec = load_spec(preset("quickstart", tmp_path), ["actor.launcher=srun", "actor.processes=2", "actor.nodes=2"])
    with pytest.raises(UsageError, match=r'actor\.launcher is "srun"'):
        pods_of(spec)


def test_init_writes_both_or_keeps_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    with pytest.raises(UsageError, match='--launcher "mpi"'):
        init(path, "fake", False, False, "mpi", Machine.here)
    init(path, "fake", False, False, "kubernetes", Machine.here)
    assert capsys.readouterr().out.startswith(f"wrote {path}\nwrote {path.with_suffix('.jobset.yaml')}\n")
    with pytest.raises(UsageError, match=r"my\.jobset\.yaml: exists already"):
        init(path, "", False, False, "kubernetes", Machine.here)
    spec = path.read_text().replace("steps = 6", "steps = 7")
    path.write_text(spec)
    init(path, "", False, True, "kubernetes", Machine.here)
    assert capsys.readouterr().out.startswith(f"wrote {path.with_suffix('.jobset.yaml')}\n")
    assert path.read_text() == spec
