"""Rows of every shape as tokens and masks, and the bad ones among them."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_conversations import CHATML, TALK, chats_of

from backends.hf.tokenizer import TextCodec, load_codec
from backends.packed.packing import Budget, Packing
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import BatchError, DataError
from specs.schema.objectives import Unit
from specs.schema.rows import RowsEval, RowsSection
from specs.schema.sections import DataSection
from specs.wire.batch import Batch
from specs.wire.role_config import DataConfig, RowsConfig
from workers.chat.chat_renderer import ChatRenderer
from workers.data import row_source
from workers.data.data_set import RunRows, open_rows
from workers.data.examples import ExampleReader, ExampleTable, build_examples, pieces
from workers.data.prompts import PromptTable, RowReader, read_table
from workers.data.row_source import BadRow, DataRow

MODEL = BUILTIN_FOLDER / "tiny-bytes"
CODEC = load_codec(str(MODEL))
ASKED, ANSWERED = TALK[:2], TALK[2:3]
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def reader_of(unit: Unit = "token", template: str = CHATML, codec: TextCodec = CODEC, **data: Any) -> ExampleReader:
    of_scores = data.pop("of_scores", False)
    section = RowsSection.model_validate({"train": "x.jsonl", "rows_per_step": 1, "max_tokens": 500, **data})
    config = RowsConfig(rows=section, eval=None, unit=unit, of_scores=of_scores)
    return ExampleReader(section.sources[0], config, codec, chats_of(template) if template else None)


def texts(values: dict[str, Any], unit: Unit = "token", template: str = CHATML, **data: Any) -> list[list[str]]:
    """Return what is seen and what is learned by turns, of each sequence."""
    example = reader_of(unit, template, **data).example(DataRow("x.jsonl:1", values))
    found = []
    for sequence in example.sequences:
        runs = groupby(pieces(sequence, CODEC), lambda piece: piece[1].startswith("learned"))
        found.append(["".join(text for text, _ in run) for _, run in runs])
    return found


HEAD = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
LATER = "1<|im_end|>\n" + NEXT


@pytest.mark.parametrize(
    ("values", "data", "wanted"),
    [
        ({"prompt": "1+1=", "completion": "2"}, {}, ["1+1=", "2<eos>"]),
        ({"prompt": "1+1=", "completion": "2<eos>"}, {}, ["1+1=", "2<eos>"]),
        ({"prompt": "q", "completion": "a"}, {"learn_from": "all"}, ["q", "a<eos>"]),
        ({"text": "hello"}, {}, ["h", "ello<eos>"]),
        ({"messages": TALK[:3]}, {}, [HEAD, "1<|im_end|>\n"]),
        ({"messages": TALK}, {}, [HEAD + LATER, "2<|im_end|>\n"]),
        (
            {"messages": [*TALK[:2], TALK[2] | {"weight": 0}, TALK[3], {"role": "assistant", "content": "2"}]},
            {},
            [HEAD + LATER, "2<|im_end|>\n"],
        ),
        ({"messages": TALK}, {"learn_from": "assistant"}, [HEAD, "1<|im_end|>\n", NEXT, "2<|im_end|>\n"]),
        ({"prompt": ASKED, "completion": TALK[2:]}, {}, [HEAD + LATER, "2<|im_end|>\n"]),
        ({"prompt": ASKED, "completion": "1"}, {}, [HEAD, "1<|im_end|>\n"]),
        ({"prompt": ASKED, "completion": ANSWERED}, {}, [HEAD, "1<|im_end|>\n"]),
        ({"prompt": "one?", "completion": "1"}, {"system": "be brief"}, [HEAD, "1<|im_end|>\n"]),
        ({"q": "1+1=", "a": "2"}, {"prompt_column": "q", "completion_column": "a"}, ["1+1=", "2<eos>"]),
        ({"prompt": "q", "completion": "a", "body": "hi"}, {"text_column": "body"}, ["h", "i<eos>"]),
        ({"messages": TALK, "q": "x", "a": "y"}, {"prompt_column": "q", "completion_column": "a"}, ["x", "y<eos>"]),
    ],
)
def test_what_a_row_holds_is_told_by_its_columns(values: Any, data: Any, wanted: list[str]) -> None:
    assert texts(values, **data) == [wanted]


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"prompt": "q ", "chosen": "a", "rejected": "b"}, "q "),
        ({"prompt": None, "chosen": "what is it?\na", "rejected": "what is it?\nb"}, "what is it?\n"),
    ],
)
def test_pairs_of_text(values: Any, seen: str) -> None:
    assert texts(values, "pair") == [[seen, "a<eos>"], [seen, "b<eos>"]]


def test_a_pair_of_text_and_messages_has_one_prompt() -> None:
    messages = [{"role": "assistant", "content": "b"}]
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    found = texts({**PAIR, "rejected": messages}, "pair")
    assert found == [[asked, "a<|im_end|>\n"], [asked, "b<|im_end|>\n"]]


def test_a_margin_is_a_reward_models_alone() -> None:
    assert texts({**PAIR, "margin": "large"}, "pair") == [["q", "a<eos>"], ["q", "b<eos>"]]


def test_a_blank_goes_with_the_word_where_completions_part() -> None:
    found = texts({"chosen": "Q: is it so? yes it is", "rejected": "Q: is it so? yet no"}, "pair")
    assert found == [["Q: is it so?", " yes it is<eos>"], ["Q: is it so?", " yet no<eos>"]]


@pytest.mark.parametrize("more", [{}, {"prompt": "one?"}, {"prompt": [{"name": None, **one} for one in ASKED]}])
def test_pairs_of_whole_conversations(more: dict[str, Any]) -> None:
    other = [{"role": "assistant", "content": "I"}]
    found = texts({**more, "chosen": [*ASKED, *ANSWERED], "rejected": [*ASKED, *other]}, "pair")
    assert found == [[HEAD, "1<|im_end|>\n"], [HEAD, "I<|im_end|>\n"]]


@pytest.mark.parametrize("prompt", [ASKED, [*ASKED, *ANSWERED]])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_prompt_that_completions_do_not_begin_with_is_never_left_out(prompt: Any, role: str) -> None:
    more = [{"role": role, "content": "two"}]
    pair = {"prompt": prompt, "chosen": [*more, *ANSWERED], "rejected": [*more, TALK[4]]}
    with pytest.raises(BadRow, match="column 'chosen' does not begin with a message of the assistant"):
        texts(pair, "pair")


@pytest.mark.parametrize(
    ("unit", "values", "data", "why"),
    [
        ("token", {"answer": "x"}, {}, "no column 'messages', 'completion' or 'text'; the row has 'answer'"),
        ("token", {"answer": "x", "text": None}, {}, "or 'text'; the row has 'answer'$"),
        ("token", {"prompt": "q", "completion": ""}, {}, "column 'completion' is empty"),
        ("token", {"prompt": "q", "completion": "a"}, {"learn_from": "assistant"}, "is about messages"),
        ("token", {"text": "q"}, {"learn_from": "completion"}, "is not about rows of one text"),
        ("token", {"messages": TALK}, {"learn_from": "completion"}, "the row is one conversation"),
        ("token", {"messages": TALK}, {"template": ""}, "the tokenizer has no chat template"),
        ("token", {"messages": TALK}, {"chat": "never"}, 'data.chat = "never"'),
        ("token", {"messages": TALK[:2]}, {}, "no message of the assistant"),
        ("pair", {"prompt": "q", "chosen": "a", "rejected": "a"}, {}, "are equal"),
        ("token", {"prompt": "q", "completion": ASKED}, {}, "'completion' does not begin with a message of the assist"),
        ("token", {"messages": TALK, "tools": {"name": "add"}}, {}, "column 'tools' must be a list"),
        ("token", {"messages": TALK, "tools": ["add"]}, {}, "must be a list of tools, each a JSON schema"),
        ("token", {"messages": TALK, "tools": "add"}, {}, "column 'tools' is no JSON"),
        ("token", {"messages": [TALK[0] | {"weight": 0.5}]}, {}, "message 0: weight must be 0 or 1"),
        ("pair", {"prompt": "q", "chosen": "a"}, {}, "column 'rejected' is empty or missing"),
        ("pair", {"chosen": "a", "rejected": "b"}, {}, "no common beginning as a prompt"),
        ("pair", {**PAIR, "margin": "2"}, {"of_scores": True}, "'margin' is no number"),
        ("pair", {**PAIR, "margin": float("nan")}, {"of_scores": True}, "is not finite"),
        ("pair", {**PAIR, "margin": 1e39}, {"of_scores": True}, "is not finite"),
        ("pair", {**PAIR, "margin": -(10**400)}, {"of_scores": True}, "is not finite"),
        ("sequence", {"completion": "a", "label": 1}, {}, "column 'label' must be true or false; it is 1"),
        ("sequence", PAIR, {}, "must be true or false; the row has 'prompt', 'chosen', 'rejected'"),
    ],
)
def test_a_bad_row_is_named(unit: Unit, values: Any, data: Any, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        texts(values, unit, **data)


def test_a_pair_that_truncation_makes_equal_is_bad() -> None:
    reader = reader_of("pair", "", max_tokens=4, overlong="truncate")
    for rejected, same in (("axy", False), ("abz", True)):
        row = DataRow("x.jsonl:7", {"prompt": "qq", "chosen": "abcd", "rejected": rejected})
        with (
            pytest.raises(DataError, match=r"x\.jsonl:7: chosen and rejected are the same 4") if same else nullcontext()
        ):
            assert build_examples([row], reader).truncated == 1


@pytest.mark.parametrize("of_scores", [False, True])
def test_the_largest_pair_is_what_a_micro_batch_must_hold(of_scores: bool) -> None:
    untrained = {**ANSWERED[0], "train": False}
    talks = {"chosen": [*TALK, untrained], "rejected": [*TALK[:2], {**ANSWERED[0], "content": "9"}]}
    pairs = [talks, *({"prompt": prompt, "chosen": "abcd", "rejected": "a"} for prompt in ("q", "qr"))]
    for row in [DataRow("x.jsonl:1", pair) for pair in pairs]:
        table = build_examples([row], reader_of("pair", of_scores=of_scores))
        packings = [Packing(Budget(table.largest - less), share_prompts=True) for less in (0, 1)]
        fits, over = (each.last_token_micro_batches if of_scores else each.micro_batches for each in packings)
        batch = Batch(table.columns([0], [0], 0))
        assert fits(batch).tokens == [table.largest]
        with pytest.raises(BatchError):
            over(batch)


def test_columns_that_are_null_are_not_there() -> None:
    """A table of columns has all of them in every row, and every key in every message."""
    absent = dict.fromkeys(("messages", "completion", "prompt", "tools", "chosen"))
    assert texts({**absent, "text": "hello"}) == [["h", "ello<eos>"]]
    messages = [{"train": None, "tool_calls": None, **message} for message in TALK[:3]]
    assert texts({**absent, "messages": messages, "tools": "[]"}) == [[HEAD, "1<|im_end|>\n"]]


# ── tokenizers ────────────────────────────────────────────────────────────────────────────────────


def llama(folder: Path, pre_tokenizer: dict[str, Any], vocab: list[str], after: list[dict[str, Any]]) -> TextCodec:
    """Make a BPE tokenizer without merges that puts <s> before text."""
    from transformers import PreTrainedTokenizerFast  # the class itself: to choose one, transformers imports torch

    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ["<s>", "</s>", "<|end|>"]
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"<s>": {"id": "<s>"}}}
    template["special_tokens"]["<s>"] |= {"ids": [0], "tokens": ["<s>"]}
    template["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    model = {"type": "BPE", "vocab": {token: at for at, token in enumerate(names + vocab)}, "merges": []}
    merges = [[token[:-1], token[-1]] for token in vocab if len(token) == 2]
    content = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": name, **special} for at, name in enumerate(names)],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "Sequence", "processors": [*after, template]},
        "decoder": pre_tokenizer,
        "model": {**model, "merges": merges},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    file = str(folder / "tokenizer.json")
    return TextCodec(PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>"), str(folder))


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
TRIMMED = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def words(values: dict[str, Any], codec: TextCodec, template: str = "") -> list[str]:
    """The tokens of a row, those that are learned with a star."""
    sequence = reader_of("token", template, codec).example(DataRow("x.jsonl:1", values)).sequences[0]
    names = codec.tokenizer.convert_ids_to_tokens(sequence.tokens)
    return [name + "*" * mask for name, mask in zip(names, sequence.mask, strict=True)]


@pytest.mark.parametrize("prompt", ["ab", "<s>ab"])
def test_begin_and_end_stand_once_and_nothing_between(prompt: str, tmp_path: Path) -> None:
    codec = llama(tmp_path / "model", METASPACE, ["▁", "a", "b", "\n"], [])
    seen = [token for token in codec.tokenizer.tokenize(prompt) if token != "<s>"]
    found = words({"prompt": prompt, "completion": "ba</s>"}, codec)
    assert found == ["<s>", *seen, "b*", "a*", "</s>*"]
    assert words({"prompt": prompt, "completion": " ba"}, codec)[-4:] == ["▁*", "b*", "a*", "</s>*"]
    assert words({"text": prompt}, codec) == ["<s>", *(f"{token}*" for token in seen), "</s>*"]
    section = DataSection(train="x.jsonl", prompts_per_step=1, max_prompt_tokens=9, max_response_tokens=9)
    reader = RowReader(section, needs_answer=False, chat=False)
    table = read_table("x.jsonl", [DataRow("x.jsonl:1", {"prompt": prompt})], reader, codec, None)
    assert codec.tokenizer.convert_ids_to_tokens(table.tokens) == ["<s>", *seen], "as a prompt of rl, too"


def test_a_text_that_holds_its_end_ends_once_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    from tokenizers import processors

    codec = llama(tmp_path / "model", METASPACE, ["▁", "a", "b"], [])
    ends = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    codec.tokenizer.backend_tokenizer.post_processor = ends
    for text in ("ab", "ab</s>"):
        assert words({"text": text}, codec)[-3:] == ["a*", "b*", "</s>*"]


def test_nothing_of_a_completion_is_lost_where_a_line_end_is_a_blank(tmp_path: Path) -> None:
    """The tokenizers of T5's kin write each blank and line end as one blank, which is part of the next word."""
    from tokenizers import normalizers

    codec = llama(tmp_path / "model", METASPACE, ["▁", "a", "b", ":", "▁b"], [])
    codec.tokenizer.backend_tokenizer.normalizer = normalizers.Nmt()
    assert words({"prompt": "a", "completion": "ba"}, codec)[-3:] == ["b*", "a*", "</s>*"]
    assert words({"prompt": "a", "completion": "\nba"}, codec)[-3:] == ["▁b*", "a*", "</s>*"]


def test_blanks_that_a_tokenizer_leaves_out_of_its_offsets(tmp_path: Path) -> None:
    """Llama 3's do: the blank before an answer is asked for, one in it is learned, and a token over both is refused."""
    template = "{% for m in messages %}u {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}u {% endif %}"
    codec = llama(tmp_path / "model", TRIMMED, ["Ġ", "a", "b", "u", "Ġb"], [TRIMMED])
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a ba"}]}
    asked = ["u", "Ġ", "a", "<|end|>", "u", "Ġ"]
    assert words(row, codec, template) == [*asked, "a*", "Ġb*", "a*", "<|end|>*"]
    row["messages"][1]["content"] = "b"
    with pytest.raises(BadRow, match="a token lies across the end of what is learned: ' b'"):
        words(row, codec, template)


def test_special_tokens_that_take_in_the_blanks_around_them(tmp_path: Path) -> None:
    """Phi's do: the one that asks for an answer is the prompt's, the one that ends it is learned."""
    from transformers import AddedToken

    codec = llama(tmp_path / "model", TRIMMED, ["Ġ", "Ċ", "a", "b"], [])
    names = ("<|user|>", "<|assistant|>", "<|end|>")
    wide = [AddedToken(name, lstrip=True, rstrip=True, special=True) for name in names]
    codec.tokenizer.add_special_tokens({"additional_special_tokens": wide})
    template = CHATML.replace("<|im_start|>{{ m.role }}", "<|{{ m.role }}|>").replace("<|im_end|>", "<|end|>")
    template = template.replace("<|im_start|>assistant", "<|assistant|>")
    for answer in ("b", " b \n"):
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}
        assert words(row, codec, template) == ["<|user|>", "a", "<|end|>", "<|assistant|>", "b*", "<|end|>*"]


@pytest.mark.parametrize("shape", ["messages", "prompt"])
def test_several_threads_find_what_one_does(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, with the same rows left out, each thread with a process for the template."""
    monkeypatch.setattr(row_source, "FEW_ROWS", 8)
    bad, started = {11: {"prompt": 1}, 40: {"messages": [], "prompt": []}}, list[object]()
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(60)]
    values = [{"messages": talk, "prompt": talk[:1]} for talk in talks]
    rows = [DataRow(f"x.jsonl:{n}", bad.get(n, row)) for n, row in enumerate(values)]
    real, meet = ChatRenderer._start, threading.Barrier(2)

    def start(chats: ChatRenderer) -> subprocess.Popen[str]:
        started.append(process := real(chats))
        if len(started) > 1:  # beside that of the first rows, which one of the threads takes over
            meet.wait(60)
        return process

    monkeypatch.setattr(ChatRenderer, "_start", start)

    def found(threads: int) -> ExampleTable | PromptTable:
        started.clear()
        with ChatRenderer(CHATML, {}, library=False) as chats:
            reader = reader_of(template="", bad_rows="drop")
            reader.chats = chats
            if shape == "messages":
                return build_examples(rows, reader, threads=threads)
            keys = {"prompts_per_step": 1, "max_prompt_tokens": 99, "max_response_tokens": 1, "bad_rows": "drop"}
            data = DataSection.model_validate({"train": "x.jsonl", **keys})
            return read_table("x.jsonl", rows, RowReader(data, False, chat=True), CODEC, chats, threads)

    one, alone = found(1), len(started)
    several = found(3)
    assert (alone, len(started)) == (1, 3)
    assert all(process.poll() is not None for process in started)
    assert len(one) == 58
    assert (one.tokens, one.offsets) == (several.tokens, several.offsets)
    assert (one.dropped_bad, one.first_bad) == (several.dropped_bad, several.first_bad) == (2, one.first_bad)
    assert one.first_bad.startswith("x.jsonl:11: ")
    assert getattr(one, "masks", None) == getattr(several, "masks", None)
    if isinstance(one, PromptTable) and isinstance(several, PromptTable):
        assert one.wheres == several.wheres == [f"x.jsonl:{n}" for n in range(60) if n not in bad]


# ── the data of a run ─────────────────────────────────────────────────────────────────────────────


def opened(folder: Path, rows: int = 20, unit: Unit = "token", eval_rows: int = 0, **data: Any) -> RunRows:
    for name in ("a", "b"):
        made = [{"prompt": f"{name}{n}", "completion": f"{n}", "label": n % 2 == 0} for n in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    section = RowsSection.model_validate({"train": "a.jsonl", "rows_per_step": 4, "max_tokens": 50, **data})
    held = RowsEval(every=1, rows=eval_rows) if eval_rows else None
    config = RowsConfig(rows=section, eval=held, unit=unit)
    about = {"model_path": str(MODEL), "trust_remote_code": False, "spec_dir": str(folder), "seed": 3}
    return open_rows(DataConfig(rows=config, **about), CODEC)


def drawn(rows: RunRows, position: int, count: int, what: str = "train") -> list[int]:
    columns, state = rows.draw(what, position, count)
    assert state["position"] == position + len(set(columns["unit_B"].tolist()))
    return columns["row_B"].tolist()


def test_each_row_is_drawn_once_in_an_epoch_and_again_after_any_position(tmp_path: Path) -> None:
    rows = opened(tmp_path, eval_rows=4)
    first = drawn(rows, 0, 16)
    assert sorted(first) == [*range(16)] != first
    assert drawn(rows, 0, 40)[16:] == drawn(opened(tmp_path, eval_rows=4), 16, 24), "as after a resume"
    assert drawn(rows, 0, 16) != drawn(rows, 16, 16), "another order"
    assert drawn(rows, 0, 9, "eval") == [16, 17, 18, 19]
    assert drawn(rows, 0, 99, "all") == [*range(16)]
    assert drawn(opened(tmp_path), 0, 9, "eval") == [], "none is held out"


def test_sources_are_mixed_by_weight_at_every_position(tmp_path: Path) -> None:
    sets = ({"path": "a.jsonl", "weight": 3.0}, {"path": "b.jsonl"})
    rows = opened(tmp_path, train="", sets=sets)
    found = np.array(drawn(rows, 0, 80)) >= 20
    assert rows.train.draw(76, 4)[1] == {"position": 80, "epoch": 3.0}
    for end in (4, 8, 40, 80):
        assert found[:end].sum() == end // 4
    assert sorted(set(drawn(rows, 0, 80))) == drawn(rows, 0, 99, "all") == [*range(40)]
    assert drawn(rows, 0, 80)[30:50] == drawn(opened(tmp_path, train="", sets=sets), 30, 20)


@pytest.mark.parametrize(
    ("rows", "unit", "data", "why"),
    [
        (20, "token", {"max_tokens": 4, "overlong": "refuse"}, r"a\.jsonl:11: the row has 6 tokens, more than"),
        (20, "token", {"max_tokens": 2}, "no row is left .20 are longer than data.max_tokens = 2"),
        (1, "sequence", {}, "every row is labelled true"),
        (2, "sequence", {"eval_rows": 1}, "every row is labelled true"),
        (20, "pair", {}, r"a\.jsonl:1: column 'chosen' is empty or missing"),
        (20, "pair", {"bad_rows": "drop"}, "no row is left .20 are bad, the first: "),
        (20, "token", {"tools_column": "x"}, "no row has the column 'x', which data.tools_column names"),
    ],
)
def test_rows_that_cannot_be_learned_end_the_start(rows: int, unit: Unit, data: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why):
        opened(tmp_path, rows, unit, **data)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    assert opened(tmp_path, max_tokens=5).report()["dropped_overlong"] == 10
    cut = opened(tmp_path, max_tokens=5, overlong="truncate")
    assert (cut.report()["rows"], cut.report()["truncated"]) == (20, 10)
    wanted = "90 tokens, 40 learned (completion, with the end of 10 of 20), longest 5"
    assert cut.report()["summary"] == wanted
