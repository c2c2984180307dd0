"""Run an environment of OpenEnv (`pip install openenv`) in process: its class, without server, client and Docker.

    # mine.py, beside the spec file and this one; my_env is what `openenv init my_env` makes
    from my_env.models import MyAction
    from my_env.server.my_env_environment import MyEnvironment
    from openenv_env import OpenEnv

    class Mine(OpenEnv):
        environment, action = MyEnvironment, MyAction

    [environment]
    path = "mine.py:Mine"

Where an action is one text, the model's turn is that text; other actions it writes as JSON. Columns of the row that the
environment's `reset` takes go to it. Override `_text` to show the model less of an observation.
"""

from __future__ import annotations

import inspect
import json
from typing import Any


class OpenEnv:
    environment: Any  # subclass of openenv.core.env_server.interfaces.Environment
    action: Any  # subclass of its Action

    def reset(self, seed: int = 0, **row: Any) -> str:
        self.running = self.environment()
        takes = inspect.signature(self.running.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        given = {"seed": seed, **row}
        given = {name: value for name, value in given.items() if takes_all or name in takes}
        return "\n" + self._text(self.running.reset(**given))

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            action = self._action(text)
        except ValueError as error:  # the model can mend it
            return str(error), 0.0, False, False, {}
        seen = self.running.step(action)
        return self._text(seen), float(seen.reward or 0.0), seen.done, False, seen.metadata

    def close(self) -> None:
        self.running.close()

    def _action(self, text: str) -> Any:
        required = {name: each.annotation for name, each in self.action.model_fields.items() if each.is_required()}
        if [*required.values()] == [str]:
            return self.action(**{name: text.strip() for name in required})
        return self.action.model_validate_json(text)

    def _text(self, seen: Any) -> str:
        shown = seen.model_dump(mode="json", exclude={"done", "reward", "metadata"})
        values = [*shown.values()]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)
