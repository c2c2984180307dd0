"""Commands of the documentation, run as they stand or read as the programs that they name would read them.

What the fence of a block says decides:

    ```bash            every command is run
    ```console         what follows `$ ` is run; every other line was printed by it, with numbers of its own. A line of
                       `…` stands for lines that are left out, and `…` at the end of a line for the rest of it
    ```toml            a spec; a part of one is laid over the preset quickstart, or over=PRESET
    ```python          run; of a file, run by the commands that name it
    ```json, ```csv    data
    ```text            no command, no code: a picture, a table, what a file holds
    checked            of bash, console, python: needs what a test has not (GPUs, a network, an hour). Every command is
                       read by the parser of its program: its options, presets, and the keys and values of `--set`
    refused            of bash: the last command ends with exit code 2, as its page says
    file=NAME          the block is that file, written to the folder in which the page's commands run
    into=NAME          of toml: these keys are changed in the spec NAME, which an earlier command wrote
    pyproject          of toml: no spec

A block of another kind is a mistake. Blocks of a page share a folder, in the order of the page. A page that speaks of
`my.toml`, `runs/NAME` and `exports/NAME` without making them finds them there: a short run of the quickstart.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli
import typer.main
import warm
from doc_pages import ROOT, Block
from running import environment

from rlctl.cli import app
from rlctl.presets import LAUNCHERS, presets
from rlctl.run.sweep import expand
from specs.errors import RlctlError
from specs.load.keys import walk
from specs.load.load import read_toml, spec_from
from specs.load.toml_text import dumped

RLCTL = typer.main.get_command(app)
# Of a block that is only read: programs whose words are not ours to know.
OTHERS = {"hf", "pip", "git", "sbatch", "kubectl", "docker", "ssh", "curl", "jupyter", "wandb"}
PLAIN = {"cat", "head", "tail", "ls", "wc"}  # of a block that is run
STEPS = 2
COLUMNS = "100"
TIMEOUT_S = 400


class Folder:
    """Where the commands of one page run, one after another."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, 0

    def do(self, block: Block) -> None:
        """Run or read a block, as its fence says. Raises AssertionError with where it stands."""
        known = ", ".join(KINDS)
        assert block.language in KINDS, f"{block}: ```{block.language}: no test knows this kind: {known}"
        try:
            KINDS[block.language](self, block)
        except (AssertionError, RlctlError, ValueError) as error:
            raise AssertionError(f"{block}: {error}") from error

    # ── blocks ────────────────────────────────────────────────────────────────────────────────────

    def bash(self, block: Block) -> None:
        *before, last = commands(block.text)
        if "refused" in block.words:
            _known(block, {"refused"}, set())
            for words in before:
                self.run(words)
            code, said = self.call([sys.executable, "-m", *last])
            assert code == 2, f"{shlex.join(last)}: exit code {code}\n{said}"
            return
        for words in (*before, last):
            self.command(words, checked=_is_checked(block))

    def console(self, block: Block) -> None:
        said = ""
        asked = [line[2:] for line in joined_lines(block.text) if line.startswith("$ ")]
        assert asked, "no line begins with `$ `: write ```text"
        for line in asked:
            for words in commands(line):
                said += self.command(words, checked=_is_checked(block))
        if not _is_checked(block):
            missing = not_said(block.text, said)
            assert not missing, "\n".join(["was not printed:", *missing, "", "but:", said])

    def toml(self, block: Block) -> None:
        tables = tomli.loads(block.text)
        _known(block, {"pyproject"}, {"file", "over", "into"})
        if "pyproject" in block.words:
            return
        if "schema" not in tables:
            into = block.named.get("into")
            base = self.path / into if into else presets()[block.named.get("over", "quickstart")]
            tables = laid_over(read_toml(base), tables)
            if into:
                base.write_text(dumped(tables), encoding="utf-8")
        spec_from(tables)
        self.write(block)

    def python(self, block: Block) -> None:
        _known(block, {"checked"}, {"file"})
        ast.parse(block.text)
        if not self.write(block) and not _is_checked(block):
            script = self.path / f"block_{block.line}.py"
            script.write_text(block.text)
            self.succeed([sys.executable, script.name])

    def data(self, block: Block) -> None:
        _known(block, set(), {"file"})
        if block.language == "json":
            for line in block.text.splitlines():
                json.loads(line)
        self.write(block)

    def text(self, block: Block) -> None:
        _known(block, set(), {"file"})
        asked = [line for line in block.text.splitlines() if line.startswith("$ ")]
        assert not asked, "a command: write ```console"
        self.write(block)

    def write(self, block: Block) -> str:
        """The file that the block is, if it is one; its name."""
        name = block.named.get("file", "")
        if name:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(block.text, encoding="utf-8")
        return name

    # ── commands ──────────────────────────────────────────────────────────────────────────────────

    def command(self, words: Sequence[str], *, checked: bool) -> str:
        """Run one, or read it; what it printed."""
        if not checked:
            return self.run(words)
        while re.match(r"[A-Z_]+=", words[0]):  # a variable of the command's environment
            words = words[1:]
        read(words, self.path)
        if words[:2] == ["rlctl", "init"] and not _placeholders(words):
            return self.run(words)  # the spec that the next commands name
        return ""

    def run(self, words: Sequence[str]) -> str:
        program, rest = words[0], list(words[1:])
        if program == "rlctl":
            read(words, self.path)
            return self.succeed([sys.executable, "-m", "rlctl", *self.shortened(rest)])
        if program == "python":
            return self.succeed([sys.executable, *rest])
        assert program in PLAIN, f"{program}: no test runs it; write `checked` if it needs what a test has not"
        done = subprocess.run(list(words), cwd=self.path, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shortened(self, words: list[str]) -> list[str]:
        """The arguments of rlctl, and what keeps a test short: a run trains for two steps, one that goes on from it for
        two more."""
        if words[0] not in ("train", "sweep") or {"--dry-run", "--help"} & set(words):
            return words
        self.steps = STEPS + (self.steps if {"--resume", "--from"} & set(words) else 0)
        return [*words, "--set", f"run.steps={self.steps}"]

    def succeed(self, command: list[str]) -> str:
        code, said = self.call(command)
        assert code == 0, f"{shlex.join(command[1:])}: exit code {code}\n{said}"
        return said

    def call(self, command: list[str]) -> tuple[int, str]:
        """Exit code, and what it printed."""
        env = environment(PYTHONPATH=str(ROOT), COLUMNS=COLUMNS)
        done = warm.run(command, env=env, timeout_s=TIMEOUT_S, cwd=self.path)
        return done.returncode, done.stdout + done.stderr


KINDS: dict[str, Callable[[Folder, Block], None]] = {
    "bash": Folder.bash,
    "console": Folder.console,
    "toml": Folder.toml,
    "python": Folder.python,
    "json": Folder.data,
    "csv": Folder.data,
    "text": Folder.text,
}


def _is_checked(block: Block) -> bool:
    _known(block, {"checked"}, {"file"})
    return "checked" in block.words


def _known(block: Block, words: set[str], named: set[str]) -> None:
    strange = [*({*block.words} - words), *({*block.named} - named)]
    assert not strange, f"```{block.language}: what does {strange[0]} mean?"


# ── from text to commands ─────────────────────────────────────────────────────────────────────────


def joined_lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def commands(text: str) -> Iterator[list[str]]:
    """Each command of a shell's lines, as words; comments are left out. A program of the clone's environment goes by
    its name."""
    for line in joined_lines(text):
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            one, words = words[:end], words[end + 1 :]
            if one[0] in (".venv/bin/rlctl", ".venv/bin/python"):
                one[0] = one[0].rpartition("/")[2]
            yield one


def _placeholders(words: Sequence[str]) -> bool:
    return any(re.search(r"\b[A-Z]{3,}", word) for word in words)


# ── a command as its program reads it ─────────────────────────────────────────────────────────────


def read(words: Sequence[str], folder: Path) -> None:
    """Raises AssertionError or SpecError where the program would refuse these words. Placeholders in capitals stand for
    anything, and `[--option N]` for an option."""
    program, rest = words[0], words[1:]
    if program == "rlctl":
        _read_rlctl([word.strip("[]") for word in rest if word != "…"], folder)
    elif program.startswith("scripts/"):
        _read_script(program, rest)
    elif program.rpartition("/")[2] == "python":
        _read_python(rest, folder)
    else:
        assert program in OTHERS, f"{program}: no program that a page may name"


def _read_rlctl(words: list[str], folder: Path) -> None:
    if words[0].startswith("-"):
        own = [name for option in RLCTL.params for name in option.opts]
        assert words[0] in ("--help", *own), f"rlctl has no option {words[0]}: {', '.join(own)}"
        return
    known = RLCTL.commands  # type: ignore[attr-defined]
    assert words[0] in known, f"rlctl has no command {words[0]}: {', '.join(known)}"
    command = known[words[0]]
    context = command.make_context(words[0], [], resilient_parsing=True)
    context.resilient_parsing = False
    given = ["--probe=meta" if word == "--probe" else word for word in words[1:]]
    if "--help" in given:
        return
    try:
        options, over, _ = command.make_parser(context).parse_args(given)
    except Exception as error:
        raise AssertionError(f"rlctl {shlex.join(words)}: {error}") from error
    assert not over, f"rlctl {shlex.join(words)}: too much: {over}"
    _read_choice(options.get("preset"), presets())
    _read_choice(options.get("launcher"), LAUNCHERS)
    if overrides := options.get("overrides"):
        _read_overrides(overrides, folder / str(options.get("spec") or ""), swept=words[0] == "sweep")


def _read_choice(value: str | None, known: Any) -> None:
    assert not value or value in known or _placeholders([value]), f"{value}: one of {', '.join(known)}"


def _read_overrides(overrides: Sequence[str], spec: Path, *, swept: bool) -> None:
    """With the spec where there is one; else the keys alone."""
    if swept:
        fixed, several = expand(overrides)
        overrides = [*fixed, *(f"{each.key}={each.values[0]}" for each in several)]
    if spec.is_file():
        spec_from(read_toml(spec), overrides)
        return
    unknown = [text for text in overrides if not is_key(text.partition("=")[0])]
    assert not unknown, f"--set {unknown[0]}: no such key"


def is_key(dotted: str) -> bool:
    """Whether the schema has it, under some kind; entries of lists are counted, or N."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", dotted) in KEYS


KEYS = {key for key, _ in walk()} | {f"{key}.N" for key, _ in walk()}


def _read_script(program: str, rest: Sequence[str]) -> None:
    script = ROOT / program
    assert os.access(script, os.X_OK) or script.suffix == ".py", f"{program}: no such script"
    beside = [script, script.with_name(script.name.replace("-", "_") + ".py")]
    text = "".join(path.read_text(encoding="utf-8") for path in beside if path.is_file())
    unknown = [word for word in rest if word.startswith("--") and word not in text]
    assert not unknown, f"{program} does not know {unknown}"
    if script.name == "setup-engine":
        assert all(word in text for word in rest), f"{program} does not know {list(rest)}"


def _read_python(rest: Sequence[str], folder: Path) -> None:
    if rest[0] in ("-m", "-c"):
        return
    if rest[0].startswith("scripts/"):
        _read_script(rest[0], rest[1:])
    else:
        assert (folder / rest[0]).is_file(), f"{rest[0]}: no such file"


# ── specs ─────────────────────────────────────────────────────────────────────────────────────────


def laid_over(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Tables of `part` in those of `base`, key by key; a table of another kind takes the place of the old one."""
    merged = dict(base)
    for key, value in part.items():
        old = base.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        same = both and value.get("kind", old.get("kind")) == old.get("kind")
        merged[key] = laid_over(old, value) if both and same else value
    return merged


# ── what a command printed ────────────────────────────────────────────────────────────────────────


def not_said(shown: str, said: str) -> list[str]:
    """Lines of a console block that its commands did not print. Numbers and white space may be others."""
    printed = {skeleton(line) for line in said.splitlines()}
    expected = [line for line in joined_lines(shown) if line.strip() not in ("", "…") and not line.startswith("$ ")]
    return [line for line in expected if not _was_printed(line, printed)]


def _was_printed(line: str, printed: set[str]) -> bool:
    """A line that ends in `…` is the beginning of one."""
    begins = line.rstrip().removesuffix("…")
    if begins == line.rstrip():
        return skeleton(line) in printed
    return any(one.startswith(skeleton(begins)) for one in printed)


def skeleton(line: str) -> str:
    """A line without what another run says otherwise: numbers, their units, bars."""
    line = re.sub(r"[▁▂▃▄▅▆▇█─]+", "─", line)
    line = re.sub(r"[-+−]?\d[\d,.:]*(e[-+]?\d+)?", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"#\s?[kMG]\b", "#", line)).strip()
