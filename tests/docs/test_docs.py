"""Everything that the pages name is there: links, anchors, files of the tree, specs that load, commands that parse."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from typer.main import get_command

from rlctl.cli import app
from rlctl.memory.memory_plan import plan_memory
from rlctl.presets import presets
from specs.load.load import load_spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"[a-z]+:", link)}


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub makes them, and of `<a id="…">`."""
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"></a>', text))


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_the_readme_leads_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {str(page.relative_to(ROOT)) for page in PAGES[1:]} <= linked


@EVERY_PAGE
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:rlctl|workers|backends|specs|tests|scripts|docs)/[\w./*-]*)`", prose(page))
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("/")))]


def test_whole_specs_load(tmp_path: Path) -> None:
    specs = [
        (page.name, text)
        for page in PAGES
        for language, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if language == "toml" and text.startswith("schema = 1")
    ]
    assert specs, "the README shows one"
    for number, (_, text) in enumerate(specs):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        load_spec(path)


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


def commands(text: str) -> list[str]:
    """Return the calls of rlctl in a page's fences, a line each."""
    shells = [code for language, code in FENCE.findall(text) if language in ("bash", "console", "sbatch", "")]
    lines = [line.strip() for code in shells for line in code.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?rlctl ", line)]


def parsed(line: str) -> None:
    """Parse a call as the command line does, without running it. Raises click's error where it cannot be called."""
    group = get_command(app)
    for call in re.split(r" (?:&&|\|) ", line):
        if call.startswith("rlctl "):
            context = group.make_context("rlctl", [], resilient_parsing=True)
            context.resilient_parsing = False
            name, command, rest = group.resolve_command(context, shlex.split(call, comments=True)[1:])
            command.make_context(name, rest, parent=context)


@EVERY_PAGE
def test_commands_of_a_page_parse(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8")):
        parsed(line)


def test_the_job_for_kuberay_is_all_that_its_submitter_runs(tmp_path: Path) -> None:
    """Its operator writes the entrypoint as it is into the command line of a shell elsewhere."""
    job = yaml.safe_load((ROOT / "docs" / "examples" / "rayjob.yaml").read_text(encoding="utf-8"))
    for program in ("ray", "rlctl"):
        (tmp_path / program).write_text(f'#!/bin/sh\nprintf "%s\\n" {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    line = f"if true ; then ray job submit --no-wait -- {job['spec']['entrypoint'].strip()} ; fi"
    done = subprocess.run(["/bin/sh", "-ce", line], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    submitted, _, command = done.stdout.partition("\nsh\n-c\n")
    assert submitted.splitlines() == ["ray", "job", "submit", "--no-wait", "--"], done.stdout + done.stderr
    assert re.fullmatch(r"cd /shared && rlctl train my\.toml .*--resume\)\n", command), done.stdout


def test_the_example_of_every_help_parses() -> None:
    assert len(app.registered_commands) > 10
    for command in app.registered_commands:
        name, _, example = str(command.epilog).partition(": ")
        assert name == "Example"
        assert example.split()[:2] == ["rlctl", command.name]
        parsed(example)


@pytest.mark.parametrize(
    ("size", "model"),
    [("0.5B", "Qwen2.5-0.5B-Instruct"), ("4B", "Qwen3-4B-Thinking-2507"), ("7B", "Qwen2.5-7B-Instruct")],
)
def test_what_fits_is_what_the_plan_says(size: str, model: str) -> None:
    """The rows of the table in docs/check-config.md whose models come with rlctl."""
    page = (ROOT / "docs" / "check-config.md").read_text(encoding="utf-8")
    (said,) = [line.split("|")[2:5] for line in page.splitlines() if line.startswith(f"| {size} |")]
    on_eight = ("devices=[0,1,2,3,4,5,6,7]", "processes=8")
    sharded = [f"{role}.{key}" for role in ("actor", "rollout") for key in on_eight]
    sharded += ["actor.launcher=torchrun", "actor.engine={kind='fsdp2'}", "actor.micro_batch_tokens=4096"]
    lora = ["actor.lora={rank=16, alpha=32.0, targets=['all-linear']}"]
    for cell, changes in zip(said, ([], lora, sharded), strict=True):
        spec = load_spec(presets()["grpo-1gpu"], [f"model.path=Qwen/{model}", *changes])
        places = plan_memory(spec, ROOT, gpu_GiB=80, host_GiB=256).places
        (peak,) = [max(map(place.bytes_in, place.phases)) for place in places if place.kind == "GPU"]
        assert f"{peak / 2**30:.0f} GiB" == cell.strip()
