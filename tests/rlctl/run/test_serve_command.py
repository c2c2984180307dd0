"""A served model answers clients with what it would write, and keeps the conversations."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_gateway import END, serving
from running import start

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run.serve_command import serve
from specs.errors import RlctlError, UsageError
from workers.episodes import served_model
from workers.gateway.chat_request import FailedRequest

TOKENS = 12
TINY = str(BUILTIN_FOLDER / "tiny-chat")
HI = {"role": "user", "content": "Hi"}
FORGETS = """
{%- for m in messages %}<|im_start|>{{ m.role[0] }}
{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>a
{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(FORGETS)  # as Qwen3's drops what was thought in earlier turns
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def greedy(model: Path, messages: list[Any]) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, held = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = held.generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(found, skip_special_tokens=True))


def test_clients_get_what_the_model_writes_and_rows_are_kept(tmp_path: Path, model: Path) -> None:
    """Greedily, as transformers writes it, over both dialects; the second turn goes on from the first."""
    import anthropic
    import openai

    out, log = tmp_path / "rows.jsonl", ""
    out.write_text('{"messages": []}\n')
    process = start("serve", model, "--temperature", "0", "--out", out, RLCTL_SERVE_KEY="secret")
    try:
        assert process.stdout is not None
        while "ANTHROPIC_BASE_URL=" not in log:
            line = process.stdout.readline()
            assert line, log
            log += line
        address = re.search(r"ANTHROPIC_BASE_URL=(\S+)", log)[1]  # type: ignore[index]
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            first = client.chat.completions.create(model="any", messages=[HI], max_tokens=TOKENS)
            said = first.choices[0].message.content
            assert said == greedy(model, [HI])
            more: list[Any] = [HI, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
            client.chat.completions.create(model="any", messages=more, max_tokens=TOKENS)
            long = {"role": "user", "content": "Hi " * 600}
            with pytest.raises(openai.BadRequestError, match="maximum context length of 512 tokens"):
                client.chat.completions.create(model="any", messages=[long])
        with anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0) as other:
            told = other.messages.create(model="any", messages=[{"role": "user", "content": "You?"}], max_tokens=TOKENS)
            assert told.content[0].text == greedy(model, [{"role": "user", "content": "You?"}])  # type: ignore[union-attr]
        stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="guessed", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    finally:
        process.send_signal(signal.SIGHUP)  # its terminal is closed
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0, log + rest
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("finish") for row in written] == [None, "length", "length"]
    rows = [row["messages"] for row in written]
    assert [[message["role"] for message in row] for row in rows] == [
        [],  # it was there
        ["user", "assistant", "user", "assistant"],
        ["user", "assistant"],
    ]
    assert rows[1][:3] == [more[0], {**more[1], "train": True}, more[2]]
    assert rows[1][3]["train"]


async def test_rows_hold_what_the_model_wrote() -> None:
    """A thought that a client drops too, but as no answer of the model's what it has put into the conversation."""
    import openai

    told, answer = {"role": "assistant", "content": "Yo."}, {"role": "assistant", "content": "Yes."}
    async with serving([f"<think>\nhm\n</think>\n\nYes.{END}", f"No.{END}"]) as served:
        client, asked = served.client(openai.AsyncOpenAI), [HI, told, HI]
        for more in ([], [answer, HI]):
            asked = [*asked, *more]
            await client.chat.completions.create(model="m", messages=asked)
        (row,) = served_model.Served.rows(SimpleNamespace(episodes=[served.episode]))  # type: ignore[arg-type]
    first, second = ({**told, "content": text, "train": True} for text in ("<think>\nhm\n</think>\n\nYes.", "No."))
    assert row == {"messages": [HI, told, HI, first, HI, second], "finish": "stop"}


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("nowhere/at-all", {}, "no run, and no model"),
        (TINY, {"step": 3}, "is not a run directory"),
        (TINY, {"host": "0.0.0.0"}, "without a key"),
        (TINY, {"context": 10**6}, "the model takes"),
        (TINY, {"out": Path()}, "that is a folder"),
        (TINY, {"engine": "vllm"}, "--engine vllm: .*: vllm is not installed"),
        (TINY, {"python": "/nowhere"}, "--engine torch: /nowhere: No such file"),
        (TINY, {"engine": "vllm", "temperature": 3.0}, "--temperature 3: vLLM samples at 0.01 to 2"),
        (TINY, {"engine": "vllm", "temperature": 0.005}, "--temperature 0.005"),
    ],
)
def test_a_wrong_call_starts_nothing(tmp_path: Path, what: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        serve(what, **{"out": tmp_path / "rows.jsonl", **options})


def test_a_language_model_that_is_a_part_has_its_own_positions(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(UsageError, match="the model takes 64 tokens"):
        serve(str(tmp_path), tmp_path / "rows.jsonl", context=65)


def test_a_model_without_a_chat_template_is_not_loaded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve(str(BUILTIN_FOLDER / "tiny-digits"), tmp_path / "rows.jsonl") == 2
    shown = capfd.readouterr()
    assert "has no chat template" in shown.err
    assert "loading" not in shown.out


def test_rows_are_written_among_those_of_others(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_bytes(b"a line without an end \xff")
    served_model.write_among(out, b"mine\n", b"")
    served_model.write_among(out, b"theirs\n", b"")
    served_model.write_among(out, b"mine\nmine too\n", b"mine\n")
    assert out.read_bytes().splitlines() == [b"a line without an end \xff", b"mine", b"mine too", b"theirs"]
    out.unlink()
    served_model.write_among(out, b"new\n", b"mine\nmine too\n")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new\n"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(RlctlError("one", hint="two"), 2, "error: one\n\nhint: two\n"), (FailedRequest("three"), 1, "error: three\n")],
)
def test_an_error_says_its_hint_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    async def broken(_: object) -> None:
        raise error

    monkeypatch.setattr(served_model, "serve", broken)
    monkeypatch.setattr(served_model.ServeConfig, "model_validate_json", lambda _: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert served_model.main() == code
    assert capsys.readouterr().err == said
