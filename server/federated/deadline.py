"""How long a round's replies are waited for, until those that are missing are asked for again."""

FIRST = 3600.0  # seconds, while no reply of this process's rounds is known
FLOOR = 60.0  # seconds, at least: another process on the machine, or a slow disk, is no reason to ask again
FACTOR = 10.0  # how many times the longest reply so far


class Deadline:
    """Seconds that replies may take, counted from when they were asked for.

    A number holds as it is. Without one the deadline follows the longest reply of this process's rounds: ten times as
    long, a minute at least, and an hour at most or twice the longest reply. So a client that hangs in a round of a
    second costs a minute, and not an hour.

    The longest of all rounds counts, and not of the last few: it is mostly the first one's, whose clients open files
    that no cache holds and compile what they run, as a client does that takes the place of another.

    A deadline that was too short must fail no run, for a machine may become slower by more than ten times. So it
    doubles with each attempt, replies that came are kept, and the last attempt is as long as if nothing had been
    measured: an hour.
    """

    def __init__(self, fixed: float | None) -> None:
        self._fixed, self._longest = fixed, 0.0

    @property
    def patience(self) -> float:
        """Seconds after which nothing else is tried; no attempt is longer."""
        return max(FIRST, 2 * self._longest) if self._fixed is None else self._fixed

    def of_attempt(self, attempt: int, retries: int) -> float:
        """Seconds of an attempt, of which 0 is the first and `retries` the last one."""
        if self._fixed is not None or not self._longest or attempt == retries:
            return self.patience
        return min(2.0**attempt * max(FLOOR, FACTOR * self._longest), self.patience)

    def saw(self, seconds: float) -> None:
        """Take note of how long a reply took."""
        self._longest = max(self._longest, seconds)
