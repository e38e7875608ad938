"""Windows: the rounds in which canaries are planted, as fractions of training or as numbers of rounds.

A window [a, b] begins when a rounds are completed and ends when b are: it holds the rounds a + 1 to b. In Jagielski et
al., "Measuring Forgetting of Memorized Training Examples" (2022), Algorithm 1 (POISON) is the window [0, T], and
Algorithm 2 (INJECT) a short one that begins at T.
"""

from flsim.base.errors import InputError

Window = tuple[float, float]
Bounds = tuple[int | None, int | None]  # the first and the last round, from 1; None for no bound
ALWAYS: Window = (0.0, 1.0)


def is_share(window: Window) -> bool:
    """Return whether a window is given as fractions of training: it ends at 1 or before."""
    return window[1] <= 1


def refuse_wrong(window: Window) -> None:
    """Raise InputError where a window ends before it begins, or mixes fractions with numbers of rounds."""
    start, end = window
    if not 0 <= start <= end:
        raise InputError(f"windows must begin at 0 or later and not end before they begin, found {list(window)}")
    if not is_share(window) and not (float(start).is_integer() and float(end).is_integer()):
        raise InputError(
            f"windows must be fractions of training, from 0 to 1, or whole numbers of rounds, found {list(window)}"
        )


def window_label(window: Window) -> str:
    """Return a window in words; empty where it holds all rounds."""
    if window == ALWAYS:
        return ""
    start, end = window
    if start == end:
        return "never"
    return f"{100 * start:g}-{100 * end:g}%" if is_share(window) else f"rounds {start + 1:,.0f}-{end:,.0f}"


def bounds_of(window: Window, rounds: int | None) -> Bounds:
    """Return the first and the last round of a window, from 1; the last is before the first where it is empty.

    Args:
        window: the window.
        rounds: number of rounds of the whole training; None where it is unknown.

    Raises:
        InputError: a fraction of an unknown number, or the window begins after the last round.
    """
    if window == ALWAYS:
        return None, None
    if rounds is None and is_share(window):
        raise InputError(
            f"windows {list(window)} is a fraction of training, whose length is unknown; give the number of rounds, or "
            f"set the window in rounds"
        )
    length = (rounds or 1) if is_share(window) else 1
    start, end = (round(bound * length) for bound in window)
    if rounds is not None and end > start >= rounds:
        raise InputError(f"windows {list(window)} begins after the last of {rounds:,} rounds; let it begin earlier")
    return start + 1 if start or end == start else None, None if window[1] == 1 and end > start else end


def injection_label(at: float) -> str:
    """Return the time of an injection in words."""
    return f"after {100 * at:g}%" if at < 1 else f"in round {at + 1:,.0f}"


def injection_bounds(at: float, rounds: int | None) -> Bounds:
    """Return the round of an injection, from 1, as the first and the last round.

    Args:
        at: completed rounds, or a fraction of training where it is below 1.
        rounds: number of rounds of the whole training; None where it is unknown.

    Raises:
        InputError: a fraction of an unknown number, or the round comes after the last one.
    """
    if rounds is None and 0 < at < 1:
        raise InputError(
            f"injections {at:g} is a fraction of training, whose length is unknown; give the number of rounds, or set "
            f"the injection in rounds"
        )
    before = round(at * (rounds or 1)) if at < 1 else int(at)
    if rounds is not None and before >= rounds:
        raise InputError(f"injections {at:g} comes after the last of {rounds:,} rounds; let it come earlier")
    return before + 1, before + 1
