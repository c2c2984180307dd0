"""Run an environment of OpenEnv (`pip install openenv`) in process: its class, without server, client and Docker.

    # mine.py, beside the spec file
    from openenv_env import OpenEnv
    from textarena_env.models import TextArenaAction
    from textarena_env.server.environment import TextArenaEnvironment

    class Mine(OpenEnv):
        environment, action = TextArenaEnvironment, TextArenaAction

    [environment]
    path = "mine.py:Mine"

Where an action is one text, the model's turn is that text; other actions it writes as JSON. Columns of the row that the
environment's `reset` takes are given to it.
"""

from __future__ import annotations

import inspect
import json
from typing import Any


class OpenEnv:
    environment: Any  # subclass of openenv.core.env_server.interfaces.Environment
    action: Any  # subclass of its Action

    async def reset(self, seed: int = 0, **row: Any) -> str:
        self.running = self.environment()
        known = inspect.signature(self.running.reset).parameters
        chosen = {name: value for name, value in row.items() if name in known}
        return "\n" + _text(await self.running.reset_async(seed=seed, **chosen))

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            action = self._action(text)
        except ValueError as error:  # the model can mend it
            return str(error), 0.0, False, False, {}
        seen = await self.running.step_async(action)
        return _text(seen), float(seen.reward or 0.0), seen.done, False, seen.metadata

    def close(self) -> None:
        self.running.close()

    def _action(self, text: str) -> Any:
        required = {name: each.annotation for name, each in self.action.model_fields.items() if each.is_required()}
        if [*required.values()] == [str]:
            return self.action(**{name: text.strip() for name in required})
        return self.action.model_validate_json(text)


def _text(seen: Any) -> str:
    """Return what the model sees: the observation's own field, or several as JSON."""
    shown = seen.model_dump(mode="json", exclude={"done", "reward", "metadata"})
    values = [*shown.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)
