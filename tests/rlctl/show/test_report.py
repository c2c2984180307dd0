"""`report.html` needs nothing from outside and shows what the run recorded."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.show.charts import line_chart, moving_average, nice_range, stacked_chart, thin
from rlctl.show.report import write_report

VOID = {"meta", "br", "line", "circle"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed without being open, or left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def fill(run_dir: Path, steps: int) -> None:
    """A run directory as `rlctl train` leaves it."""
    records = [{"step": 0, "eval/heldout/reward_mean": 0.11}]
    for step in range(1, steps + 1):
        records.append(
            {"step": step, "reward/mean": 1 - math.exp(-step / 30), "actor/loss": 0.01 / step, "actor/kl": 0.0,
             "actor/entropy": 2.0 / step, "actor/grad_norm": None if step == 2 else 0.5, "rollout/length_mean": 5.0,
             "rollout/logprob_gap": 2e-7, "time/step_s": 1.0, "time/rollout_s": 0.5, "time/update_s": 0.4,
             "time/sync_s": 0.02, "time/wall_s": 1.5, "perf/tokens_per_s": 12000.0, "sync/GB_per_s": 0.8,
             "sync/verified": True}
        )  # fmt: skip
    records[-1]["eval/heldout/reward_mean"] = 0.93
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    samples = [
        {
            "step": i,
            "prompt": f"<{i}>",
            "completion": "1234",
            "completion_raw": "1234<eos>",
            "finished": i % 2 == 0,
            "answer": "1243",
            "reward": 0.5,
        }
        for i in range(30)
    ]
    (run_dir / "samples.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in samples) + '{"step": 31, "pr'
    )
    model = {"model_class": "Qwen2ForCausalLM", "parameters": 300_000, "dtype": "fp32", "attn_implementation": "sdpa"}
    rank = {"role": "actor", "rank": 0, "world_size": 1, "engine": "ddp", "device": "cpu", "threads": 2, "model": model,
            "versions": {"torch": "2.13.0"}}  # fmt: skip
    reward = {**rank, "role": "reward", "engine": "", "model": None}
    (run_dir / "as_built.json").write_text(json.dumps({"actor": [rank], "reward": [reward]}))
    (run_dir / "resolved.json").write_text(json.dumps({"run": {"name": "sort <digits>", "steps": 100}}))
    (run_dir / "logs").mkdir()


def page_of(run_dir: Path) -> tuple[str, str]:
    """The report's source, and its text; fails when a tag is left open."""
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    source = path.read_text()
    parser = Balanced()
    parser.feed(source)
    assert parser.open == []
    return source, " ".join(parser.texts)


def test_a_full_run_is_on_the_page(tmp_path: Path) -> None:
    fill(tmp_path, 100)
    source, text = page_of(tmp_path)
    for part in ("sort <digits>", "100 of 100", "2:30", "0.0328 → 0.964", "0.110 → 0.930", "12.0k", "100 of 100",
                 "Qwen2ForCausalLM", "300.0k", "torch 2.13.0", "<29>", "<0>"):  # fmt: skip
        assert part in text
    for title in (
        "Reward",
        "Loss",
        "Entropy",
        "Gradient norm",
        "Completion length",
        "Time per step",
        "Throughput",
        "Weight sync",
    ):
        assert f'aria-label="{title}"' in source
    assert 'aria-label="KL"' not in source, "a metric that is always zero needs no chart"
    assert "<15>" not in text, "only the first and last samples are shown"
    assert 'href="logs"' in source
    assert 'href="checkpoints"' not in source, "no link to what is not there"


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    fill(tmp_path, 50)
    source, _ = page_of(tmp_path)
    assert "<script" not in source
    assert not re.search(r"https?://|url\(|@import", source)


class Tags(HTMLParser):
    """Tags with their attributes, and what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.links: set[str | None] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(name for name, _ in attrs)))
        self.links |= {value for name, value in attrs if name in ("href", "src", "action")}

    def handle_data(self, data: str) -> None:
        self.text += data


def tags_of(run_dir: Path) -> Tags:
    write_report(run_dir)
    tags = Tags()
    tags.feed((run_dir / "report.html").read_text())
    return tags


HOSTILE = (
    '</script><script>alert(1)</script>"\'><img src=x onerror=alert(1)><a href="javascript:alert(1)">x</a>'
    "</pre></td><svg onload=alert(1)><!--\x1b]52;c;aGk=\x07\x9b2J\u202e\ud800\u2028"
)


def test_what_a_model_or_a_file_says_is_text_on_the_page(tmp_path: Path) -> None:
    """Every text of every file that the page is made from."""
    for name in ("sound", "hostile"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, 3)
    run_dir = tmp_path / "hostile"
    sample = dict.fromkeys(("step", "prompt", "completion", "completion_raw", "finished", "answer", "reward"), HOSTILE)
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for _ in range(2)))
    built = json.loads((run_dir / "as_built.json").read_text())
    model = dict.fromkeys(("model_class", "dtype", "attn_implementation"), HOSTILE)
    texts = dict.fromkeys(("role", "rank", "world_size", "engine", "device", "threads"), HOSTILE)
    built["actor"][0] |= texts | {"model": model, "versions": {HOSTILE: HOSTILE}}
    (run_dir / "as_built.json").write_text(json.dumps(built))
    (run_dir / "resolved.json").write_text(json.dumps({"run": {"name": HOSTILE, "steps": HOSTILE}}))
    metrics = {"step": 3, f"eval/{HOSTILE.replace('/', '')}/reward_mean": 0.5, f"time/{HOSTILE}_s": 1.0}
    metrics |= {"time/step_s": 2.0, f"mem/{HOSTILE}_GiB": 1.0}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    (run_dir / "memory.json").write_text(json.dumps({HOSTILE: {"planned_GiB": 1, "used_GiB": 2}}))
    (tmp_path / "sound" / "memory.json").write_text(json.dumps({"actor": {"planned_GiB": 1, "used_GiB": 2}}))
    sound, hostile = tags_of(tmp_path / "sound"), tags_of(run_dir)
    assert hostile.tags == sound.tags
    assert hostile.links <= sound.links | {"memory.json"}
    assert hostile.text.count("<script>alert(1)") >= 12
    assert not set(hostile.text) & set("\x1b\x07\x9b\u202e\u2028")
    assert "default-src 'none'" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_barely_begun(tmp_path: Path, steps: int) -> None:
    fill(tmp_path, steps)
    _, text = page_of(tmp_path)
    assert ("No step has ended yet." in text) is (steps == 0)


def test_an_empty_or_broken_directory_still_gives_a_page(tmp_path: Path) -> None:
    assert "No step has ended yet." in page_of(tmp_path)[1]
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    assert "metrics.jsonl:1" in page_of(tmp_path)[1]


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    page_of(tmp_path)
    before = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html.partial").mkdir()  # the write fails, as on a full disk
    assert write_report(tmp_path) is None
    assert (tmp_path / "report.html").read_text() == before


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_values_and_are_few(low: float, spread: float) -> None:
    ticks = nice_range(low, low + spread)
    slack = (ticks[1] - ticks[0]) * 1e-6
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + spread - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_long_series_are_thinned_and_keep_their_ends() -> None:
    series = [(float(i), float(i % 7)) for i in range(10_000)]
    thinned = thin(series)
    assert len(thinned) == 300
    assert (thinned[0][0], thinned[-1][0]) == (0.0, 9999.0)
    assert sum(y for _, y in thinned) / 300 == pytest.approx(3.0, abs=0.1)
    assert thin(series[:5]) == series[:5]
    assert moving_average([(1.0, 0.0), (2.0, 3.0), (3.0, 6.0)])[1] == (2.0, 3.0)


def test_charts_stay_inside_their_frame() -> None:
    wild = [(float(i), math.sin(i) * 10 ** (i % 5)) for i in range(1, 100)]
    for chart in (line_chart("x", {"a": wild}), stacked_chart("y", {"a": [(x, abs(y)) for x, y in wild]})):
        numbers = [tuple(map(float, pair.split(","))) for pair in re.findall(r"-?[\d.]+,-?[\d.]+", chart)]
        assert numbers
        assert all(0 <= x <= 460 and 0 <= y <= 220 for x, y in numbers)
    assert line_chart("empty", {"a": []}) == stacked_chart("empty", {}) == ""
