"""Play single-player games of textarena (`pip install textarena`), by the id in a row's column `game`.

    {"prompt": "Let us play.", "game": "GuessTheNumber-v0"}

    [environment]
    path = "textarena_env.py:TextArena"

`textarena.envs.registration.ENV_REGISTRY` has the ids. Wordle and Hangman also need words of nltk.
"""

from __future__ import annotations

from typing import Any

import textarena


class TextArena:
    """Replies with what the game says since the player's last move; it rewards the last one."""

    def reset(self, game: str, seed: int = 0) -> str:
        self.game = textarena.make(f"{game}-raw")  # without wrappers that repeat the whole game in each turn
        self.game.reset(num_players=1, seed=seed)
        return "\n" + self._news()

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, info = self.game.step(text)
        if not done:
            return self._news(), 0.0, False, False, info
        rewards, infos = self.game.close()
        return self._news(), float(rewards[0]), True, False, infos[0]

    def _news(self) -> str:
        _, said = self.game.get_observation()
        return "\n".join(str(text) for _, text, kind in said if kind != textarena.ObservationType.PLAYER_ACTION)
