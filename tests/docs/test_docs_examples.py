"""Examples of `docs/examples/environments/`, in the processes that a run gives them: with their libraries where these
are installed; without them they load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from environment_pools import LIMIT_S, make_pool, opened, started, written

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "environments"


def copied(folder: Path, name: str) -> str:
    return str(shutil.copy(EXAMPLES / name, folder / name) and name)


def needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"pip install {library}")


@pytest.mark.parametrize(
    ("file", "setup", "mode"),
    [
        ("textarena_env.py", {"path": "textarena_env.py:TextArena"}, "text"),
        ("openenv_env.py", {"path": "openenv_env.py:OpenEnv"}, "text"),
        ("verifiers_taskset.py", {"agent": "verifiers_taskset.py:run"}, "agent"),
    ],
)
async def test_an_example_loads_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, setup: dict[str, Any], mode: str
) -> None:
    """A package of its library's name that has whatever is imported from it stands in."""
    copied(tmp_path, file)
    for module in re.findall(r"^(?:from|import) ((?:textarena|verifiers)[\w.]*)", (EXAMPLES / file).read_text(), re.M):
        place = tmp_path / "packages"
        for part in module.split("."):
            place = place / part
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").write_text("def __getattr__(name): return None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    pool = make_pool(tmp_path, processes=1, **setup)
    async with started(pool) as described:
        assert (described.mode, described.tools) == (mode, ())


@needs("textarena")
async def test_a_game_of_textarena(tmp_path: Path) -> None:
    path = f"{copied(tmp_path, 'textarena_env.py')}:TextArena"
    pool = make_pool(tmp_path, path=path, processes=1)
    async with started(pool):
        turns = []
        for _ in range(2):
            low, high, done, rewards = 1, 20, False, []
            async with opened(pool, {"game": "GuessTheNumber-v0", "prompt": "Let us play."}, seed=3) as game:
                while not done:
                    guess = (low + high) // 2
                    reply = await game.step(f"It may be [{guess}].")
                    assert f"[{guess}]" not in reply.text, "the model's own move is no news"
                    assert "You are Player 0" not in reply.text, "what it has read does not come again"
                    low, high = (guess + 1, high) if "higher" in reply.text else (low, guess - 1)
                    rewards.append(reply.reward)
                    done = reply.done
            turns.append((guess, len(rewards)))
            assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
        assert turns[0] == turns[1], "the seed is the game"


OPENENV = """
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from openenv_env import OpenEnv

    class Guess(Action):
        message: str

    class Said(Observation):
        text: str = ""

    class Number(Environment[Guess, Said, State]):
        def reset(self, seed=None, number=3):
            self.number = number
            return Said(text=f"Guess. The seed is {seed}.")

        def step(self, action):
            right = action.message == str(self.number)
            return Said(text="right" if right else "wrong", reward=right, done=right)

        state = property(lambda self: State())

    class Step(Action):
        left: int
        up: int = 0

    class Place(Observation):
        x: int = 0
        y: int = 0

    class Walk(Environment[Step, Place, State]):
        def reset(self, seed=None, episode_id=None, **options):
            self.place = Place(x=options["start"])
            return self.place

        def step(self, action, timeout_s=None, **options):
            self.place = Place(x=self.place.x - action.left, y=self.place.y + action.up, reward=0.5)
            return self.place

        state = property(lambda self: State())

    class Numbers(OpenEnv):
        environment, action = Number, Guess

    class Walks(OpenEnv):
        environment, action = Walk, Step
"""


@needs("openenv")
async def test_an_environment_of_openenv(tmp_path: Path) -> None:
    copied(tmp_path, "openenv_env.py")
    mine = written(tmp_path, OPENENV, "mine.py")
    numbers = make_pool(tmp_path, path=f"{mine}:Numbers", processes=1)
    walks = make_pool(tmp_path, path=f"{mine}:Walks", processes=1)
    async with started(numbers):
        environment = await numbers.open()
        assert await environment.reset({"number": 7, "prompt": "…"}, 5) == "\nGuess. The seed is 5."
        replies = [await environment.step(text) for text in (" 3\n", "7")]
        assert [(each.text, each.reward, each.done) for each in replies] == [
            ("wrong", 0.0, False),
            ("right", 1.0, True),
        ]
        await environment.close()
    async with started(walks), opened(walks, {"start": 4, "prompt": "…"}) as environment:
        wrong = await environment.step("left")
        assert ("Invalid JSON" in str(wrong.text), wrong.reward, wrong.done) == (True, 0.0, False)
        walked = await environment.step('{"left": 1, "up": 2}')
        assert (json.loads(str(walked.text)), walked.reward) == ({"x": 3, "y": 2}, 0.5)


TASKSET = """
    import verifiers.v1 as vf

    class Sum(vf.TaskData):
        answer: str

    class Adding(vf.Task[Sum]):
        async def setup(self, trace, runtime):
            await runtime.write("start.txt", b"ready")

        @vf.reward(weight=2.0)
        async def right(self, trace) -> float:
            return float(trace.last_message.content.strip() == self.data.answer)

        @vf.reward(weight=0.5)
        async def brief(self, trace, runtime) -> float:
            found = await runtime.run(["cat", "start.txt"], {})
            return float(found.stdout == "ready" and len(trace.assistant_messages[0].content) < 4)

        @vf.metric
        async def length(self, trace) -> float:
            return float(len(trace.last_message.content))

    class Sums(vf.Taskset[Adding, vf.TasksetConfig]):
        def load(self):
            for n in range(5):
                data = Sum(prompt=f"{n} + 1 =", answer=str(n + 1), system_prompt="Only the number.")
                yield Adding(data, self.config.task)

    __all__ = ["Sums"]
"""


@needs("verifiers")
@pytest.mark.slow
async def test_a_taskset_of_verifiers(tmp_path: Path) -> None:
    example = copied(tmp_path, "verifiers_taskset.py")
    written(tmp_path, TASKSET, "adding.py")
    command = [sys.executable, example, "adding", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    asked = [{"role": "system", "content": "Only the number."}, {"role": "user", "content": "1 + 1 ="}]
    assert (len(rows), rows[1]["prompt"]) == (3, asked)
    pool = make_pool(tmp_path, agent=f"{example}:run", processes=1, memory_MiB=1024)

    async def outcome(said: str) -> dict[str, Any]:
        async def chat(request: Mapping[str, Any]) -> Mapping[str, Any]:
            assert request["messages"] == asked
            return {"role": "assistant", "content": said}

        environment = await pool.open()
        try:
            return await asyncio.wait_for(environment.run_agent({**rows[1], "messages": asked}, chat), LIMIT_S)
        finally:
            await environment.close()

    async with started(pool):
        assert await outcome("2") == {"reward": 2.5, "metrics": {"length": 1.0}}
        assert await outcome("two") == {"reward": 0.5, "metrics": {"length": 3.0}}
        assert await outcome("It is 2.") == {"reward": 0.0, "metrics": {"length": 8.0}}
