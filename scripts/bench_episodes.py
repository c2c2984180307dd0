"""Episodes of several turns: how busy environments that take their time leave the sampler, and what a turn costs.

    python scripts/bench_episodes.py [--episodes 512] [--repeats 3] [--repeatable true]

512 episodes of 4 turns at once, by a run's driver and processes, with `builtin:tiny-chat` and its random weights. The
environment sleeps for 50 to 500 ms in each step (seeded), or replies at once; a turn has 10 tokens on average. Medians
over batches, without the first. *Busy*: the share of the wall clock in which a call of `generate` was open.
"""

from __future__ import annotations

import argparse
import json
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import _bench  # noqa: F401  # the path of the packages
import psutil
from rich.console import Console
from rich.table import Table

from rlctl.loop.driver import UpdateWindow
from rlctl.loop.step_metrics import idle_s
from rlctl.processes.hosts import plan_for_hosts
from rlctl.recipes.rl import Rl
from rlctl.run.run_dir import RunDir
from rlctl.run.startup import start
from rlctl.run.train import open_groups
from rlctl.show.progress import Progress
from specs.load.load import load_spec
from specs.wire.messages import Message, Verb

ENVIRONMENT = """
import random, time

class Nap:
    def reset(self, number, seed):
        self.turns, self.seed = 0, seed

    def step(self, text):
        self.turns += 1
        time.sleep(NAP_S * random.Random(f"{self.seed} {self.turns} {text}").uniform(0.1, 1.0))
        return "on", float(len(text)), self.turns == 4, False, {}
"""
SPEC = """schema = 1
run = { name = "bench", steps = STEPS }
model = { path = "builtin:tiny-chat", from_scratch = true }
data = { train = "builtin:guesses", prompts_per_step = GROUPS, max_prompt_tokens = 32, max_response_tokens = 80 }
environment = { path = "nap.py:Nap", max_turns = 4, max_episode_tokens = 448, processes = EPISODES }
algorithm = { kind = "grpo", group_size = 16 }
rollout = { engine = { kind = "torch", max_sequences = EPISODES }, repeatable = REPEATABLE, stop = STOP }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--repeatable", choices=["true", "false"], action="append", help="only this (default: both)")
    options = parser.parse_args()
    table = Table("repeatable", "environment", "turns/s", "busy", "of instant", "CPU ms/turn: driver, reward, template")
    for repeatable in options.repeatable or ["true", "false"]:
        instant = 0.0
        for name, nap_s in (("instant", 0.0), ("50 to 500 ms", 0.5)):
            found = [*batches(options.episodes, options.repeats + 1, repeatable, nap_s)][1:]
            turns_per_s, busy, *cpu_ms = (median(column) for column in zip(*found, strict=True))
            instant = instant or busy
            cost = f"{sum(cpu_ms):.2f} = " + " + ".join(f"{each:.2f}" for each in cpu_ms)
            table.add_row(repeatable, name, f"{turns_per_s:.0f}", f"{busy:.1%}", f"{busy / instant:.1%}", cost)
    Console(width=120).print(table)


def batches(episodes: int, steps: int, repeatable: str, nap_s: float) -> Iterator[tuple[float, ...]]:
    """Play batches of episodes in a run of their own; yield turns per second, the busy share and CPU ms per turn."""
    text = SPEC.replace("STOP", json.dumps([*string.digits])).replace("REPEATABLE", repeatable)
    for name, value in {"STEPS": steps, "GROUPS": episodes // 16, "EPISODES": episodes}.items():
        text = text.replace(name, str(value))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "nap.py").write_text(ENVIRONMENT.replace("NAP_S", str(nap_s)))
        (folder / "spec.toml").write_text(text)
        spec, run = load_spec(folder / "spec.toml", []), RunDir(folder / "run")
        run.open(spec, folder / "spec.toml", resume=False)
        plan, drawing = plan_for_hosts(spec, folder, run.path), list[tuple[float, float]]()
        with open_groups(run, plan, lambda: None) as groups:
            driver = start(run, plan, groups, UpdateWindow(), Progress(steps, 0, "bench"))
            assert isinstance(driver, Rl)
            receive, reward = groups["rollout"].receive, psutil.Process(groups.membership.members["reward", 0].pid)

            def listen(rank: int, message: Message) -> None:
                if message.verb is Verb.GENERATE and message.busy is not None:
                    drawing.append(message.busy)
                receive(rank, message)

            groups["rollout"].receive = listen  # type: ignore[method-assign]
            driver.begin(0)
            for step in range(1, steps + 1):
                before, began = cpu_s(reward), time.monotonic()
                with driver.phase("rollout", step):
                    drawn = driver.queue.take(step)
                ended, turns = time.monotonic(), int(drawn.batch["turns_B"].sum())
                cost_ms = [1e3 * (now - then) / turns for now, then in zip(cpu_s(reward), before, strict=True)]
                yield turns / (ended - began), 1 - idle_s(drawing, began, ended) / (ended - began), *cost_ms
                driver.queue.trained()
                driver.sync.actor_finished(spec.weights_version(step))
                driver.send_weights(step)


def cpu_s(reward: psutil.Process) -> list[float]:
    """Return the CPU seconds so far of this process, of the reward role's and of the chat template's."""
    (template,) = (child for child in reward.children() if any("chat_template" in word for word in child.cmdline()))
    return [sum(process.cpu_times()[:2]) for process in (psutil.Process(), reward, template)]


if __name__ == "__main__":
    main()
