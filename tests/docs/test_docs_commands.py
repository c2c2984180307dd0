"""Every command and every piece of code of README.md, CONTRIBUTING.md and docs/*.md: run, or read as its program would.

`tests/support/doc_commands.py` says how a block's fence decides which.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from doc_commands import Folder, commands, not_said, read, skeleton
from doc_pages import PAGES, ROOT, Block, blocks, code_spans

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GRANTED = ("runs/NAME", "exports/NAME")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages about runs take for granted: a spec, its run and the model that was exported from it."""
    folder = Folder(tmp_path_factory.mktemp("trained"))
    for line in (
        "rlctl init my.toml",
        "rlctl train my.toml --run-dir runs/NAME",
        "rlctl export-checkpoint runs/NAME exports/NAME",
    ):
        folder.run(line.split())
    return folder.path


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_do_what_their_fence_says(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = blocks(page)
    runs = "".join(block.text for block in found if block.language in ("bash", "console") and not block.words)
    if any(name in runs for name in GRANTED):
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    folder = Folder(tmp_path)
    for block in found:
        folder.do(block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_running_text_are_commands(page: Path, tmp_path: Path) -> None:
    wrong = []
    for text in code_spans(page):
        if re.match(r"(\.venv/bin/)?(rlctl -{0,2}\w|python |scripts/[\w-]+( |$))", text):
            try:
                for words in commands(text):
                    read(words, tmp_path)
            except AssertionError as error:
                wrong.append(f"`{text}`: {error}")
    assert not wrong


# ── the test of the test ──────────────────────────────────────────────────────────────────────────


def block(fence: str, text: str) -> Block:
    language, *words = fence.split() or [""]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    return Block(ROOT / "README.md", 1, language, tuple(word for word in words if "=" not in word), named, text)


@pytest.mark.parametrize(
    ("fence", "text", "words"),
    [
        ("", "rlctl train my.toml", "no test knows this kind"),
        ("ruby", "puts 1", "no test knows this kind"),
        ("bash later", "rlctl --version", "what does later mean"),
        ("text", "$ rlctl train my.toml", "write ```console"),
        ("console", "rlctl --version", "no line begins with"),
        ("bash", "curl https://example.com", "no test runs it"),
        ("bash checked", "trl grpo", "no program that a page may name"),
        ("bash checked", "rlctl trian my.toml", "no command trian"),
        ("bash checked", "rlctl train my.toml --runs 3", "No such option"),
        ("bash checked", "rlctl train my.toml other.toml", "too much"),
        ("bash checked", "rlctl init my.toml --preset grpo-9gpu", "grpo-9gpu: one of"),
        ("bash checked", "rlctl train my.toml --set run.stepz=3", "run.stepz=3: no such key"),
        ("bash checked", "rlctl init a.toml\nrlctl train a.toml --set run.steps=-1", "run.steps"),
        ("bash checked", "rlctl sweep my.toml --set actor.optimizer.rl=1e-6,3e-6", "no such key"),
        ("bash checked", "scripts/quikstart", "no such script"),
        ("bash checked", "scripts/chaos --longer", "does not know"),
        ("bash checked", "scripts/setup-engine vlm", "does not know"),
        ("console", "$ rlctl --version\nrlctl version 1.0", "was not printed"),
        ("bash", "rlctl train nothing.toml", "exit code 2"),
        ("bash refused", "rlctl --version", "exit code 0"),
        ("toml", "[actor]\nlearning_rate = 1", "actor.learning_rate"),
        ("toml", "[algorithm]\ngroup_size = 1", "algorithm.group_size"),
        ("python", "import rlctl\nrlctl.trian", "no attribute 'trian'"),
        ("json file=a.jsonl", "{'a': 1}", "Expecting property name"),
    ],
)
def test_a_wrong_block_is_found(fence: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        Folder(tmp_path).do(block(fence, text))


def test_blocks_share_a_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.do(block("python file=numbers/seven.py", "SEVEN = 7\n"))
    folder.do(block("json file=rows.jsonl", '{"a": 1}\n{"a": 2}\n'))
    folder.do(block("python", "import sys; sys.path.append('numbers'); from seven import SEVEN; assert SEVEN == 7"))
    folder.do(block("console", "$ wc -l rows.jsonl && python block_1.py\n1 rows.jsonl\n"))


def test_numbers_and_widths_may_differ() -> None:
    assert skeleton("step 2/100  reward -0.05  15.9k tokens/s  1:02") == skeleton("step 1/1 reward 1e-3 7 tokens/s 0:5")
    assert not_said("$ it\nreward 1\n…\nfailed 3\n", "x\nreward  0.5\n") == ["failed 3"]
    assert list(commands("a b # c\nd 'e f' \\\n  g && .venv/bin/python h")) == [
        ["a", "b"],
        ["d", "e f", "g"],
        ["python", "h"],
    ]
