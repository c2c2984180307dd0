"""Episodes of several turns: how busy environments that take their time leave the sampler, and what a turn costs.

    python scripts/bench_episodes.py [--episodes 512] [--repeats 3] [--repeatable true] [--profile FOLDER]

512 episodes of 4 turns at once, each in a process of its own, with `builtin:tiny-chat` and its random weights, by the
driver and the processes of a run; nothing is trained. The environment sleeps for 50 to 500 ms in each step (seeded), or
replies at once. A turn ends by chance, after 10 tokens on average. Reported: medians over batches, the first one apart.
Busy is the share of the wall clock in which the sampler had something to draw; machinery is the CPU of the driver, of
the reward role's own process and of its chat template by turn. `--profile` has py-spy record these two.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import _bench  # noqa: F401  # the path
import psutil
from rich.console import Console
from rich.table import Table

from rlctl.loop.driver import UpdateWindow
from rlctl.loop.step_metrics import idle_s
from rlctl.processes.hosts import plan_for_hosts
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
        self.turns, self.random = 0, random.Random(f"{seed}")

    def step(self, text):
        time.sleep(NAP_S * random.Random(f"{self.random.random()} {text}").uniform(0.1, 1.0))
        self.turns += 1
        return "on", float(len(text)), self.turns == 4, False, {}
"""
SPEC = {
    "run": 'name = "bench"\nsteps = {steps}',
    "model": 'path = "builtin:tiny-chat"\nfrom_scratch = true',
    "data": 'train = "builtin:guesses"\nprompts_per_step = {groups}\nmax_prompt_tokens = 32\nmax_response_tokens = 80',
    "environment": 'path = "nap.py:Nap"\nmax_turns = 4\nmax_episode_tokens = 448\nprocesses = {episodes}',
    "algorithm": 'kind = "grpo"\ngroup_size = 16',
    "rollout": 'engine = {{ kind = "torch", max_sequences = {episodes} }}\nrepeatable = {repeatable}\nstop = {stop}',
    "actor": "threads = 1",
}


@dataclass(frozen=True)
class Figures:
    """Of one batch of episodes."""

    wall_s: float
    busy_s: float
    turns: int
    machinery_s: float

    @property
    def busy(self) -> float:
        return self.busy_s / self.wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--repeatable", choices=["true", "false"], action="append", help="only this (default: both)")
    parser.add_argument("--profile", type=Path, help="a folder for flame graphs")
    options = parser.parse_args()
    table = Table("repeatable", "environment", "wall s", "busy", "of instant", "turns/s", "machinery ms/turn")
    for repeatable in options.repeatable or ["true", "false"]:
        instant = 0.0
        for name, nap_s in (("instant", 0.0), ("50–500 ms", 0.5)):
            found = [*batches(options, repeatable, nap_s)][1:]
            busy = median(one.busy for one in found)
            instant = instant or busy
            numbers = [median(one.turns / one.wall_s for one in found), median(one.wall_s for one in found)]
            cost_ms = median(1e3 * one.machinery_s / one.turns for one in found)
            row = (f"{numbers[1]:.1f}", f"{busy:.1%}", f"{busy / instant:.1%}", f"{numbers[0]:.0f}", f"{cost_ms:.2f}")
            table.add_row(repeatable, name, *row)
    Console().print(table)


def batches(options: argparse.Namespace, repeatable: str, nap_s: float) -> Iterator[Figures]:
    """Play batches of episodes in a run of their own."""
    values = {"steps": options.repeats + 1, "groups": options.episodes // 16, "episodes": options.episodes}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "nap.py").write_text(ENVIRONMENT.replace("NAP_S", str(nap_s)))
        text = "schema = 1\n" + "".join(f"[{name}]\n{lines}\n" for name, lines in SPEC.items())
        (place / "spec.toml").write_text(
            text.format(**values, repeatable=repeatable, stop=json.dumps([*string.digits]))
        )
        spec, run = load_spec(place / "spec.toml", []), RunDir(place / "run")
        run.open(spec, place / "spec.toml", resume=False)
        plan, progress = plan_for_hosts(spec, place, run.path), Progress(values["steps"], 0, "bench")
        with open_groups(run, plan, lambda: None) as groups:
            driver = start(run, plan, groups, UpdateWindow(), progress)
            drawing: list[tuple[float, float]] = []
            receive = groups["rollout"].receive

            def listen(rank: int, message: Message) -> None:
                if message.verb is Verb.GENERATE and message.busy is not None:
                    drawing.append(message.busy)
                receive(rank, message)

            groups["rollout"].receive = listen  # type: ignore[method-assign]
            driver.begin(0)
            reward = psutil.Process(groups.membership.members["reward", 0].pid)
            with profiled(options.profile, f"{repeatable}-{nap_s}", os.getpid(), reward.pid):
                for step in range(1, values["steps"] + 1):
                    drawing.clear()
                    cpu_s, began = machinery_s(reward), time.monotonic()
                    with driver.phase("rollout", step):
                        drawn = driver.queue.take(step)
                    ended = time.monotonic()
                    driver.queue.trained()
                    driver.sync.actor_finished(driver.spec.weights_version(step))
                    driver.send_weights(step)
                    turns, wall_s = int(drawn.batch["turns_B"].sum()), ended - began
                    busy_s = wall_s - idle_s(drawing, began, ended)
                    yield Figures(wall_s, busy_s, turns, machinery_s(reward) - cpu_s)
        run.release()


def machinery_s(reward: psutil.Process) -> float:
    """Return the CPU seconds so far of this process, the reward role's, and the chat template's."""
    template = [child for child in reward.children() if any("chat_template" in word for word in child.cmdline())]
    return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), reward, *template))


@contextmanager
def profiled(folder: Path | None, name: str, *pids: int) -> Iterator[None]:
    """Have py-spy look at processes, where there is a folder for what it finds."""
    spies = []
    for who, pid in zip(("driver", "reward"), pids, strict=True) if folder else ():
        command = ["py-spy", "record", "-r", "200", "-f", "raw", "-o", f"{folder}/{name}-{who}.txt", "-p", str(pid)]
        spies.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    yield
    for spy in spies:
        spy.send_signal(2)
        spy.wait()


if __name__ == "__main__":
    main()
