"""Environments as `check-config` tries them: shown as the model will see them, bounded, leaving nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import assert_problems, write_case
from process_ends import ended

from backends.hf.tokenizer import load_codec
from rlctl.check.check_command import check
from rlctl.check.environments import TriedEnvironment
from rlctl.check.findings import Findings, examine
from rlctl.check.tables import _environment_table
from rlctl.models.paths import BUILTIN_FOLDER

pytestmark = pytest.mark.usefixtures("warm_children")

SETS = {
    "model.path": "builtin:tiny-chat",
    "data.train": "rows.jsonl",
    "data.max_prompt_tokens": 32,
    "reward.terms": [{"kind": "environment"}],
    "environment": {"path": "shop.py:Shop", "max_episode_tokens": 200},
}
SHOP = '''
class Shop:
    def reset(self, budget: int, seed: int) -> str:
        self.left = budget
        return f" for {budget}"

    async def buy(self, coins: int, item: str = "tea") -> str:
        """Buy an item.

        Args:
            coins: Its price.
        """
        self.left -= coins
        return f"{self.left} left"
'''
ROW = '{"prompt": "Shop", "budget": 7}\n'


def case_of(code: str, folder: Path, **sets: Any) -> Path:
    return write_case({"set": {**SETS, **sets}, "files": {"shop.py": code, "rows.jsonl": ROW}}, folder)


def tried(found: Findings) -> TriedEnvironment:
    (one,) = found.environments
    return one


def shown(one: TriedEnvironment) -> list[str]:
    return [str(cell) for column in _environment_table(one).columns for cell in column.cells]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_scripted_call_goes_through_template_parser_tool_and_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = case_of(SHOP, tmp_path)
    assert check(spec, (), as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["environments"]
    one, codec = found["tried"], load_codec(str(BUILTIN_FOLDER / "tiny-chat"))
    assert (found["max_turns"], one["mode"], one["row"]) == (8, "tools", f"{tmp_path}/rows.jsonl:1")
    assert one["tools"] == [{"name": "buy", "arguments": "coins, item?", "about": "Buy an item."}]
    prompt = "<|im_start|>s\nbuy(coins, item)\n<|im_end|>\n<|im_start|>u\nShop for 7<|im_end|>\n<|im_start|>a\n"
    turn = '<tool_call>\n{"name": "buy", "arguments": {"coins": 1}}\n</tool_call>'
    suffix = "\n<|im_start|>t\n6 left<|im_end|>\n<|im_start|>a\n"
    assert (one["turn"], one["reply"], one["reply_error"]) == (turn, "6 left", False)
    tokens = codec.encode([prompt, turn + "<|im_end|>", suffix], rendered=True)
    assert [one["turn_ids"], one["suffix_ids"]] == tokens[1:]
    assert one["prompt_tokens"] == len(tokens[0])
    tools, _ = prompt.split("<|im_start|>u")
    assert one["tools_tokens"] == len(codec.encode([tools], rendered=True)[0])


def test_the_tables_show_it() -> None:
    tools = [{"name": "buy", "arguments": "coins", "about": "Buy."}]
    ids = {"turn_ids": [*range(9)], "suffix_ids": [*range(20, 23)]}
    counts: dict[str, Any] = {"prompt_tokens": 40, "tools_tokens": 9, **ids}
    texts: dict[str, Any] = {"turn": "<call>", "reply": "KeyError: 1", "reply_error": True}
    one = TriedEnvironment("environment", "shop.py:Shop", "tools", tools, "/a/rows.jsonl:3", **counts, **texts)
    cells = shown(one)
    for text in (
        *("shop.py:Shop: tools", "buy(coins)  Buy.", "rows.jsonl:3", "40 tokens, 9 of them for the tools"),
        *('"<call>"', '"KeyError: 1" (an error; the arguments are invented)'),
        "3 tokens: … 3 4 5 6 7 8 | 20 21 22 …",
    ):
        assert text in cells


def test_a_limit_of_tool_calls_is_shown_where_tools_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_text = "class Shop:\n    def reset(self):\n        pass\n\n    def step(self, text):\n        return text\n"
    for code, calls in ((SHOP, True), (of_text, False)):
        assert check(case_of(code, tmp_path), (), as_json=False) == 0
        said = capsys.readouterr().out
        assert ("shop.py:Shop: at most" in said, "tool calls" in said) == (True, calls)


def test_it_runs_as_in_a_run_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    code = """
import os, subprocess
print("loud")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
class Shop:
    def reset(self):
        assert os.environ["A"] == "b"
    def step(self, text):
        return f"{child.pid} {subprocess.Popen(['sleep', '600'], start_new_session=True).pid}"
"""
    spec = case_of(code, tmp_path, **{"reward.env": {"A": "b"}})
    before = {file: file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*")) if file.name != "tmp"}
    found = examine(spec, ())
    assert (found.problems, found.warnings, tried(found).turn) == ([], [], "?")
    assert {file: file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*")) if file.name != "tmp"} == before
    assert capfd.readouterr() == ("", "")
    assert all(ended(int(pid)) for pid in str(tried(found).reply).split())


def test_code_that_hangs_or_ends_the_process_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.check.environments.START_TIMEOUT_S", 4.0)
    sleep = "import time; time.sleep(600)"
    code = {
        "start": f"{SHOP}\n{sleep}\n",
        "call": SHOP.replace("self.left -=", f"{sleep}\n        _ ="),
        "reset": SHOP.replace("self.left = budget", sleep),
        "end": f"import os\nprint('last words', flush=True)\nos._exit(7)\n{SHOP}",
    }
    rows = "".join(f'{{"prompt": "Shop", "budget": 7, "kind": "{name}"}}\n' for name in code)
    shops = [
        {"name": name, "path": f"{name}.py:Shop", "max_episode_tokens": 200, "call_timeout_s": 1.0} for name in code
    ]
    sets = {**SETS, "data.environment_column": "kind", "environment": shops}
    files = {"rows.jsonl": rows, **{f"{name}.py": text for name, text in code.items()}}
    found = examine(write_case({"set": sets, "files": files}, tmp_path), ())
    wanted = {"environment.0.path": "not ready after 4 s", "environment.3.path": "the process ended with status 7"}
    assert_problems(wanted, found.problems)
    assert_problems({"environment.2.path": "raise environment.2.call_timeout_s"}, found.warnings)
    _, call, _, end = found.environments
    assert (call.reply, call.reply_error) == ("no answer within 1 s", True)
    assert '"no answer within 1 s" (it loses the episode; the arguments are invented)' in shown(call)
    assert "last words" in shown(end)


def test_without_a_row_or_a_model_it_is_tried_as_far_as_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    one = tried(examine(case_of(SHOP, tmp_path, **{"data.train": "some/rows"}), ()))
    assert (one.row, one.reply, bool(one.suffix_ids), one.prompt_tokens) == ("", None, True, None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    one = tried(examine(case_of(SHOP, tmp_path, **{"model.path": "some/model", "model.from_scratch": False}), ()))
    assert (one.reply, one.suffix_ids) == ("6 left", [])
