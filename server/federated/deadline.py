"""The time that a round waits for replies before it asks again for those that are missing."""

FIRST = 3600.0  # seconds, while this process has seen no reply
FLOOR = 60.0  # seconds, at least: another process on the machine, or a slow disk, is no reason to ask again
FACTOR = 10.0  # multiple of the longest reply so far


class Deadline:
    """The number of seconds that replies may take, counted from their request.

    A fixed number holds in every round. Without one the deadline follows the longest reply of this process's rounds: it
    is ten times as long, at least a minute, and at most an hour or twice the longest reply. So a client that hangs in a
    round of a second costs a minute, and not an hour.

    The longest reply of all rounds counts, not of the last few. It is mostly in the first round, whose clients open
    files that no cache holds and compile kernels. A client that replaces another does the same.

    A deadline that is too short must fail no run, as a machine may become more than ten times slower. So the deadline
    doubles with each attempt, replies that came are kept, and the last attempt lasts as long as without any
    measurement: an hour.
    """

    def __init__(self, fixed: float | None) -> None:
        self._fixed, self._longest = fixed, 0.0

    @property
    def patience(self) -> float:
        """Return the seconds after which the run gives up; no attempt is longer."""
        return max(FIRST, 2 * self._longest) if self._fixed is None else self._fixed

    def of_attempt(self, attempt: int, retries: int) -> float:
        """Return the seconds of an attempt, of which 0 is the first and `retries` the last one."""
        if self._fixed is not None or not self._longest or attempt == retries:
            return self.patience
        return min(2.0**attempt * max(FLOOR, FACTOR * self._longest), self.patience)

    def saw(self, seconds: float) -> None:
        """Record how long a reply took, in seconds."""
        self._longest = max(self._longest, seconds)
