"""A game: guess a digit, with a hint after each wrong guess."""


class Guess:
    def reset(self, number: int) -> None:
        """Begin a game. `number` is the row's column of that name."""
        self.number, self.guesses, self.low, self.high = number, 0, 0, 9

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        """Take a guess: what the player reads, the reward, whether the game is won, whether it is broken off."""
        self.guesses += 1
        if not (len(text) == 1 and text.isdecimal()):
            return "a digit", -0.2, False, False, {}
        guess = int(text)
        if guess == self.number:
            return "right", 1.1 - 0.1 * self.guesses, True, False, {}
        ruled_out = not self.low <= guess <= self.high
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return "higher" if guess < self.number else "lower", -0.2 * ruled_out, False, False, {}
