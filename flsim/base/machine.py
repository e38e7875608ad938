"""The memory of this machine, and the refusal of what can never fit it."""

import os

from flsim.base.errors import InputError


def machine_memory() -> int:
    """Return the physical memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_beyond_memory(needed: float, what: str, remedy: str) -> None:
    """Raise InputError where something needs more bytes than this machine has.

    Args:
        needed: bytes that are needed at the least.
        what: what needs them, with the setting and its value.
        remedy: what to do, as the end of a sentence.

    Raises:
        InputError: `needed` exceeds the machine's memory.
    """
    if needed > machine_memory():
        raise InputError(
            f"{what} needs {needed / 1e9:,.0f} GB of memory at least, and this machine has "
            f"{machine_memory() / 1e9:,.0f} GB; {remedy}"
        )
