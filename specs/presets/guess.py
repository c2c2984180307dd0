"""A game: guess a digit, with a hint after each wrong guess."""


class Guess:
    def reset(self, number: int) -> None:
        """Begin a game. `number` is the row's column of that name."""
        self.number, self.guesses = number, 0

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        """Take a guess: what the player reads, the reward, whether the game is won, whether it is broken off."""
        self.guesses += 1
        guess = text.strip()
        if guess == str(self.number):
            return "right", 1.1 - 0.1 * self.guesses, True, False, {}
        if not (len(guess) == 1 and guess.isdecimal()):
            return "a digit", 0.0, False, False, {}
        return "higher" if self.number > int(guess) else "lower", 0.0, False, False, {}
