"""`report.html` needs nothing from outside and shows what the run recorded."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlctl.show.charts import chart, thin
from rlctl.show.journal import EVALUATION, Journal
from rlctl.show.report import render
from rlctl.show.report_compare import differences, finals, read_runs, render_comparison
from rlctl.show.report_page import SCRIPT, write_page
from rlctl.show.report_samples import sample_sections
from specs.errors import RunDirError

VOID = {"meta", "br", "line", "circle", "input"}


class Page(HTMLParser):
    """Collects tags with their attributes, links and text; fails on a tag that is closed without being open."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.links: set[str | None] = set()
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(name for name, _ in attrs)))
        self.links |= {value for name, value in attrs if name in ("href", "src", "action")}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def fill(run_dir: Path, steps: int) -> None:
    """A run directory as `rlctl train` leaves it."""
    records = [{"step": 0, "eval/heldout/reward_mean": 0.11}]
    for step in range(1, steps + 1):
        records.append(
            {"step": step, "reward/mean": 1 - math.exp(-step / 30), "actor/loss": 0.01 / step, "actor/kl": 0.0,
             "actor/entropy": 2.0 / step, "actor/grad_norm": None if step == 2 else 0.5, "rollout/length_mean": 5.0,
             "rollout/logprob_gap": 2e-7, "time/step_s": 1.0, "time/rollout_s": 0.5, "time/update_s": 0.4,
             "time/sync_s": 0.02, "time/restart_s": 0.0,
             "time/wall_s": 1.5, "perf/tokens_per_s": 12000.0, "sync/GB_per_s": 0.8,
             "sync/verified": True}
        )  # fmt: skip
    records[-1]["eval/heldout/reward_mean"] = 0.93
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = {"completion": "1234", "completion_raw": "1234<eos>", "answer": "1243", "reward": 0.5}
    samples = [{"step": i, "prompt": f"<{i}>", "finished": i % 2 == 0, **common} for i in range(30)]
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


def parsed(run_dir: Path) -> Page:
    """The report; fails when a tag is left open."""
    assert write_page(run_dir / "report.html", render(run_dir)) is None
    page = Page((run_dir / "report.html").read_text())
    assert page.open == []
    return page


def page_of(run_dir: Path) -> tuple[str, str]:
    """The report's source, and its text."""
    text = parsed(run_dir).text
    return (run_dir / "report.html").read_text(), text


def test_a_full_run_is_on_the_page(tmp_path: Path) -> None:
    fill(tmp_path, 100)
    source, text = page_of(tmp_path)
    for part in ("sort <digits>", "100 of 100", "2:30", "0.0328 → 0.964", "0.110 → 0.930", "12.0k", "100 of 100",
                 "Qwen2ForCausalLM", "300.0k", "torch 2.13.0", "<29>", "<0>"):  # fmt: skip
        assert part in text
    for title in ("Reward", "Loss", "Gradient norm", "Completion length", "Time per step", "Throughput"):
        assert f'aria-label="{title}"' in source
    assert 'aria-label="KL"' not in source, "a metric that is always zero needs no chart"
    assert "restart" not in text, "nor does a phase that took no time need a band"
    assert 'href="logs"' in source
    assert 'href="checkpoints"' not in source, "no link to what is not there"


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    fill(tmp_path, 50)
    source, _ = page_of(tmp_path)
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source, "the policy lets this one script run, and no other"
    assert not re.search(r"https?://|url\((?!#)|@import", source)


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
    metrics = {"step": 4, f"eval/{HOSTILE.replace('/', '')}/reward_mean": 0.5, f"time/{HOSTILE}_s": 1.0}
    metrics |= {"time/step_s": 2.0, f"mem/{HOSTILE}_GiB": 1.0}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    (run_dir / "memory.json").write_text(json.dumps({HOSTILE: {"planned_GiB": 1, "used_GiB": 2}}))
    (tmp_path / "sound" / "memory.json").write_text(json.dumps({"actor": {"planned_GiB": 1, "used_GiB": 2}}))
    sound, hostile = parsed(tmp_path / "sound"), parsed(run_dir)
    assert hostile.tags == sound.tags
    assert hostile.links <= sound.links | {"memory.json"}
    assert hostile.text.count("<script>alert(1)") >= 12
    assert not set(hostile.text) & set("\x1b\x07\x9b\u202e\u2028")
    assert "default-src 'none'" in (run_dir / "report.html").read_text()


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    page_of(tmp_path)
    before = (tmp_path / "report.html").read_text()
    (tmp_path / f"report.html.{os.getpid()}.partial").mkdir()  # the write fails, as on a full disk
    assert write_page(tmp_path / "report.html", render(tmp_path)) is not None
    assert (tmp_path / "report.html").read_text() == before


def test_long_series_are_thinned_to_their_means() -> None:
    series = [(float(i), float(i % 7)) for i in range(10_000)]
    thinned = thin(series)
    assert (len(thinned), thinned[-1][0]) == (300, 9999.0)
    assert sum(y for _, y in thinned) / 300 == pytest.approx(3.0, abs=0.1)
    assert thin(series[:5]) == series[:5]
    assert chart("empty", {"a": []}) == ""


# ── how a run went ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("end", "running", "told"),
    [
        ({"outcome": "done"}, False, ""),
        ({"outcome": "failed", "error": "actor rank 0: <died>", "hint": "look there"}, False, "Failed after step 3"),
        ({"outcome": "interrupted", "error": "interrupted"}, False, "Interrupted after step 3"),
        (None, False, "Ended after step 3 without a word: it was killed"),
        (None, True, "Running: 3 steps done"),
    ],
)
def test_the_page_says_how_the_run_ended(tmp_path: Path, end: dict | None, running: bool, told: str) -> None:
    fill(tmp_path, 3)
    journal = Journal(tmp_path, 1)
    journal.add("start", spec="s.toml", overrides=["run.steps=3"])
    journal.add("warning", text="step 1: all <completions> score 0")
    if end:
        journal.add("end", **end)
    source, text = page_of(tmp_path)
    source = render(tmp_path, running=running)
    text = re.sub(r"<[^>]*>", "", source)
    assert told in text
    assert ("Failed" in text, "Ended after" in text) == ("Failed" in told, "Ended after" in told)
    assert "actor rank 0: &lt;died&gt;" in text or not end or "error" not in end or end["outcome"] != "failed"
    assert "all &lt;completions&gt; score 0" in text
    assert ('http-equiv="refresh"' in source) is ('data-refresh="15"' in source) is running


def test_an_evaluation_that_was_killed_is_not_to_be_resumed(tmp_path: Path) -> None:
    """`rlctl train --resume` would train in its folder."""
    for event in ("start", EVALUATION):
        Journal(tmp_path, 1).add(event)
    assert "<p>Evaluate again.</p>" in (source := render(tmp_path))
    assert "--resume" not in source


def test_restarts_of_every_attempt_count(tmp_path: Path) -> None:
    lines = [{"step": step, "rollout/restarts": n} for step, n in enumerate([0, 1, 3, 0, 2], start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<dt>sampler restarts</dt><dd>5</dd>" in render(tmp_path)


def test_an_evaluation_before_the_first_step_is_shown(tmp_path: Path) -> None:
    """All that there is where `rlctl eval` measured a model."""
    assert "No step has ended yet." in render(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/heldout/reward_mean": 0.25}\n')
    page = render(tmp_path)
    assert "<dt>eval heldout</dt><dd>0.250</dd>" in page
    assert re.findall("<dt>(.*?)</dt>", page) == ["steps", "eval heldout"], "nothing of what it does not have"


def test_attempts_and_forks_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for attempt, outcome in ((1, "failed"), (2, "done")):
        Journal(tmp_path, attempt).add("start", overrides=[f"run.steps={attempt}"])
        Journal(tmp_path, attempt).add("end", outcome=outcome, error="a <reason>" * (attempt == 1))
    (tmp_path / "forked_from.json").write_text(json.dumps({"run": "/runs/base", "step": 40}))
    (tmp_path / "resolved.attempt_2.json").write_text(json.dumps({"run": {"name": "x", "steps": 240}}))
    _, text = page_of(tmp_path)
    for part in ("3 of 240", "Attempts", "Forked from /runs/base at step 40", "a <reason>", "run.steps=2"):
        assert part in text


# As much of a browser as the page's script needs.
BROWSER = """
const element = (kind, attributes) => ({kind, attributes, style: {}, children: [], listeners: {},
  dataset: Object.fromEntries(Object.entries(attributes).filter(([name]) => name.startsWith('data-'))
    .map(([name, value]) => [name.slice(5), value])),
  setAttribute(name, value) { this.attributes[name] = String(value); },
  appendChild(child) { this.children.push(child); return child; }, replaceChildren() { this.children = []; },
  setPointerCapture() {}, addEventListener(name, does) { this.listeners[name] = does; }});
const tip = {}, values = latest.map(textContent => ({textContent})), svgs = drawn.map(attributes => {
  const svg = element('svg', attributes);
  svg.getBoundingClientRect = () => ({left: 0, width: 460});
  svg.parentNode = {querySelector: () => tip, querySelectorAll: () => values};
  return svg;
});
const forms = tables.map(rows => Object.assign(element('form', {}), {elements: {shown: {value: 'last'}},
  querySelectorAll: () => [{}, ...rows.map(row => element('tr', row))]}));
forms.forEach(form => { const rows = form.querySelectorAll('tr'); form.querySelectorAll = () => rows; });
const document = {body: {dataset: {}}, querySelectorAll: what => what === 'svg' ? svgs : forms,
  createElementNS: (_, kind) => element(kind, {})};
"""
ON_A_CHART = """
const event = clientX => ({clientX, preventDefault() {}}), at = step => 52 + (step - 1) / 29 * (448 - 52), said = {};
const [svg] = svgs, says = () => [tip.textContent, ...values.map(value => value.textContent)];
const has = name => svg.children.filter(child => child.attributes.class === name);
const marks = () => has('tick').map(tick => Number(tick.textContent));
const lines = () => svg.children.find(child => child.kind === 'svg').children.map(line => line.attributes.points);
said.drawn = marks(); said.lines = lines();
svg.listeners.pointermove(event(at(12.2))); said.moved = says();
svg.listeners.pointerleave(event(0)); said.left = says();
svg.listeners.pointerdown(event(at(21.3))); svg.listeners.pointermove(event(at(28)));
said.picked = has('picked')[0].style.display;
svg.listeners.pointerup(event(at(28.8))); said.zoomed = marks();
svg.listeners.pointermove(event(52)); said.moved_again = says();
svg.listeners.dblclick(); said.out = marks();
svg.listeners.pointerdown(event(at(21.3))); svg.listeners.pointerup(event(at(21.3))); said.clicked = marks();
console.log(JSON.stringify(said));
"""


def in_browser(asks: str, figure: str = "", tables: Sequence[Sequence[dict[str, str]]] = ()) -> Any:
    """Run the page's script in node beside a chart and tables of samples; return what `asks` prints."""
    drawn = [dict(re.findall(r'([a-z-]+)="([^"]*)"', found)) for found in re.findall(r"<svg ([^>]*)", figure)]
    given = {"drawn": drawn, "latest": re.findall(r"<b>(.*?)</b>", figure), "tables": tables}
    code = "".join(f"const {name} = {json.dumps(value)};" for name, value in given.items()) + BROWSER + SCRIPT + asks
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")


@needs_node
def test_the_pointer_tells_the_values_of_a_chart_and_a_drag_zooms() -> None:
    actor = [(x, 0.123456 if x < 21 else 5 + x / 1e3) for x in map(float, range(1, 31))]
    said = in_browser(ON_A_CHART, chart("Loss", {"actor": actor, "critic": [(1.0, 9.0), (20.0, 8.0), (30.0, 9.0)]}))
    assert said["drawn"] == said["out"] == said["clicked"] == [0, 2.5, 5, 7.5, 10, 1, 16, 30]
    assert [line.split()[0] for line in said["lines"]] == ["52.00,191.73", "52.00,28.40"]
    assert said["moved"] == ["step 12", "0.1235", "8 at 20"], "values of that step, or of the nearest that has one"
    assert said["left"] == ["", "5.03", "9"], "the latest values"
    assert said["picked"] == "block"
    *values, first, middle, last = said["zoomed"]
    assert (first, middle, last) == (21, 25, 29), "whole steps"
    assert 4.9 < values[0] <= 5.021, "the height fits what is seen"
    assert 5.029 <= values[-1] < 5.11
    assert said["moved_again"] == ["step 21", "5.021", "8 at 20"]


@needs_node
@pytest.mark.parametrize(("values", "stacked"), [([1e-300] * 3, False), ([7.0] * 60, False), ([1.0, 2.0, 4.0], True)])
def test_charts_stay_inside_their_frame(values: list[float], stacked: bool) -> None:
    own = [(float(step), value) for step, value in enumerate(values)]
    asks = "console.log(JSON.stringify(svgs[0].children.find(c => c.kind === 'svg').children.map(c => c.attributes)))"
    shapes = in_browser(asks, chart("x", {"a": own, "b": own}, stacked=stacked))
    assert len(shapes) == (2 if len(own) < 40 else 4), "a long line has a smoothed one over it"
    for shape in shapes:
        places = [tuple(map(float, pair.split(","))) for pair in shape["points"].split()]
        assert all(52 <= x <= 448 and 10 <= y <= 194 for x, y in places)


@needs_node
@pytest.mark.parametrize("stacked", [False, True])
def test_a_chart_of_one_step_shows_it(stacked: bool) -> None:
    asks = "console.log(JSON.stringify(svgs[0].children.find(c => c.kind === 'svg').children.map(c => c.kind)))"
    figure = chart("x", {"a": [(1.0, 2.0)], "b": [(1.0, 3.0)]}, stacked=stacked)
    assert in_browser(asks, figure) == ["circle", "circle"], "a polygon of one step has no area"


@needs_node
def test_best_worst_and_cut_off_samples_can_be_picked() -> None:
    rows = [
        {"data-i": str(i), "data-reward": "" if i == 35 else str(i * 7 % 40), "data-graded": "no" if i == 35 else "yes",
         "data-end": "truncated" if i % 3 == 0 else "finished"}
        for i in range(40)
    ]  # fmt: skip
    shown = in_browser(
        """console.log(JSON.stringify(Object.fromEntries(
  ['last', 'first', 'best', 'worst', 'truncated', 'not graded', 'all', 'random'].map(choice => {
    forms[0].elements.shown.value = choice; forms[0].listeners.change();
    return [choice, forms[0].querySelectorAll('tr').slice(1).filter(row => !row.hidden).map(row => +row.dataset.i)];
  }))))""",
        tables=[rows],
    )
    late = sorted((i for i in range(30, 40) if i != 35), key=lambda i: i * 7 % 40)
    assert (shown["first"], shown["last"]) == (list(range(8)), list(range(32, 40)))
    assert (shown["worst"], shown["best"]) == (sorted(late[:8]), sorted(late[-8:]))
    assert (shown["truncated"], shown["not graded"]) == (list(range(0, 40, 3)), [35])
    assert len(shown["all"]) == 40
    assert len(shown["random"]) < 30


# ── several runs ──────────────────────────────────────────────────────────────────────────────────


def test_runs_are_compared_by_curves_specs_and_ends(tmp_path: Path) -> None:
    for name, steps, lr in (("low", 20, 1e-6), ("high", 40, 1e-3)):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        fill(run, steps)
        resolved = {
            "run": {"name": name, "steps": 100},
            "actor": {"optimizer": {"lr": lr}},
            "reward": {"terms": [{"kind": "exact_match", "weight": lr}]},
        }
        (run / "resolved.json").write_text(json.dumps(resolved))
        Journal(run, 1).add("start")
    Journal(tmp_path / "high" / "run", 1).add("end", outcome="done")
    runs = read_runs([tmp_path / "low" / "run", tmp_path / "high" / "run"])
    assert [run.name for run in runs] == ["low/run", "high/run"]
    changed = [[key, "1e-06", "0.001"] for key in ("actor.optimizer.lr", "reward.terms.0.weight")]
    assert differences(runs) == (["key", "low/run", "high/run"], changed)
    headings, rows = finals(runs)
    table = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [row["steps"] for row in table] == ["20", "40"]
    assert [row["end"] for row in table] == ["unfinished", "done"]
    last = [1 - math.exp(-step / 30) for step in (19, 20)]
    assert table[0]["reward"] == f"{sum(last) / 2:.3f}"
    (tmp_path / "low" / "run" / "report.html").touch()
    source = render_comparison(runs, tmp_path / "a page.html")
    assert '<a href="low/run/report.html">low/run</a></nav>' in source, "a link to each page that is there"
    (series,) = re.findall(r'aria-label="Reward" data-stacked="0" data-series="(.*?)"', source)
    assert [len(points) for points in json.loads(series)] == [20, 40], "a line of each run"
    assert "actor.optimizer.lr" in source
    with pytest.raises(RunDirError, match="is not a run directory"):
        read_runs([tmp_path])


def test_an_evaluation_is_drawn_beside_what_it_compares_with(tmp_path: Path) -> None:
    """A run on rows whose model also writes has a mean reward; that is no loss."""
    evaluated = {"eval/heldout/loss": 2.5, "eval/heldout/reward_mean": 0.125}
    records = [{"step": 0, **evaluated}, {"step": 1, "actor/loss": 2.75, **evaluated}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source, _ = page_of(tmp_path)
    found = dict(reversed(re.findall(r'aria-label="(.*?)" data-stacked="0" data-series="(.*?)"', source)))
    assert json.loads(found["Loss"]) == [[[1, 2.75]], [[0, 2.5], [1, 2.5]]]
    assert json.loads(found["Reward mean, eval heldout"]) == [[[0, 0.125], [1, 0.125]]]


def test_runs_that_are_followed_by_different_accuracies_show_both(tmp_path: Path) -> None:
    """An evaluation without steps has no column of its own."""
    of_run = {
        "dpo": {"actor/reward_accuracy": 0.25, "eval/heldout/reward_accuracy": 0.75},
        "rm": {"reward_model/accuracy": 0.5, "eval/heldout/accuracy": 1.0},
        "eval": {"eval/heldout/reward_mean": 0.125},
    }
    for name, line in of_run.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 4, **line}) + "\n")
        (tmp_path / name / "resolved.json").write_text("{}")
    headings, rows = finals(read_runs([tmp_path / name for name in of_run]))
    assert "reward" not in headings
    cells = [{cell for cell in row[4:] if cell != "–"} for row in rows]
    assert cells == [{"0.250", "0.750"}, {"0.500", "1"}, {"0.125"}]


WRITES = """
import sys
from pathlib import Path
from rlctl.show.report_page import write_page
for _ in range(30):
    assert write_page(Path(sys.argv[1]), 1_000_000 * "x") is None
"""


def test_a_run_and_a_person_may_write_its_page_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path / "page.html")]
    assert [each.wait() for each in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("page.html", 1_000_000)]


def test_a_long_episode_is_cut_as_other_samples_are(tmp_path: Path) -> None:
    own = {"text": "ab" * 9000, "tokens": [["ab", -0.5]] * 9000}
    pieces = [{"text": "asked"}, {"text": "ab", "tokens": [["ab", -0.5]]}, {"text": "told"}, own, {"text": "late"}]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "pieces": pieces, "reward": 1.0}) + "\n")
    page = sample_sections(tmp_path / "samples.jsonl", "Samples")
    assert page.count("<i title='-0.500'>ab</i>") == (2400 - len("told")) / 2
    assert page.count("<i ") == page.count("<i title='-0.500'>ab</i>")
    assert "told" in page
    assert "late" not in page
    assert " …</pre>" in page


def test_lines_that_are_no_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [{"pieces": [{}, 1]}, {"pieces": [{}, {}]}, {"requests": [1]}, {"requests": [{}]}, {"terms": [10**400]}]
    lines = [*odd, [], 7, None, "a", {}, {"step": 1, "completion": "sound"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, text = page_of(tmp_path)
    assert "sound" in text
    assert "5 lines" in text


def test_a_page_takes_no_more_memory_than_the_samples_on_it(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "name": "held", "prompt": "p" * 2000, "completion": "c" * 2000, "reward": 1.0}) + "\n"
    (tmp_path / "eval.jsonl").write_text(4000 * line)
    tracemalloc.start()
    page = sample_sections(tmp_path / "eval.jsonl", "Evaluation")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert page.count("<tr data-reward") == 128
    assert most < 4_000_000
