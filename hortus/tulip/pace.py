"""How long a queue takes, told by the steps so far: what Retry-After says. Pure; does not know the queue."""

from __future__ import annotations

from collections import deque

STEPS = 64
"""Steps that are remembered."""
GUESSED_S = 5.0
"""Most seconds told while only small steps were seen."""
LEAST_S, MOST_S = 1.0, 60.0


class Pace:
    """A full engine takes tokens as fast as the best of the latest steps did: a small step takes nearly as long as one ten times
    as large, so a mean over both would send clients away for too long."""

    def __init__(self, full: int) -> None:
        """full: tokens of a full step."""
        self._full = full
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)  # tokens a second, tokens

    def note(self, tokens: int, seconds: float) -> None:
        """A step that went through."""
        self._steps.append((tokens / max(seconds, 1e-6), tokens))

    def seconds(self, tokens: int) -> float:
        """Until so many tokens are through: 1 to 60. Where all steps were under an eighth of a full one, what they tell is a
        bound far above: then at most 5."""
        if not self._steps:
            return LEAST_S
        best, _ = max(self._steps)
        small = all(8 * n < self._full for _, n in self._steps)
        return min(max(tokens / best, LEAST_S), GUESSED_S if small else MOST_S)
