"""The memory and the devices of this machine, and the refusal of what it can never do."""

import os
from contextlib import suppress
from pathlib import Path

from flsim.base.errors import InputError

DEVICES = ("cpu", "cuda")  # types of torch's devices
GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Return the memory that this process and its children may use in total, bytes: a container may limit it."""
    limit = of_group("memory", "memory.max", "memory.limit_in_bytes").strip()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, int(limit)) if limit.isdigit() else total


def of_group(controller: str, *names: str) -> str:
    """Return the first of a controller's files in this process's control group, version 1 or 2; empty without one."""
    for line in text_of(GROUP).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / (controller if controllers else "")
        for folder in (root / group.lstrip("/"), root):  # in a container the group's path may not be visible
            for name in names:
                if (folder / name).is_file():
                    return text_of(folder / name)
    return ""


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel; empty where there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def refuse_missing_device(device: str, name: str = "device") -> None:
    """Raise InputError where torch has no such device here, or flsim does not compute on it.

    torch has more devices, such as "meta", whose tensors hold no values, and "mps".

    Args:
        device: torch's name of a device, such as "cuda".
        name: what the user set, for the message.
    """
    import torch

    try:
        if torch.device(device).type not in DEVICES:
            raise InputError(f"{name} {device}: flsim computes on {' and '.join(DEVICES)}; name one of them")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"{name} {device}: torch has none here; use cpu") from error


def refuse_beyond_memory(needed: float, what: str, remedy: str) -> None:
    """Raise InputError where something needs more bytes than this machine has, or its container.

    Args:
        needed: bytes that are needed at the least.
        what: what needs them, with the setting and its value.
        remedy: what to do, as the end of a sentence.

    Raises:
        InputError: `needed` exceeds it.
    """
    if needed > machine_memory():
        raise InputError(
            f"{what} needs {needed / 1e9:,.0f} GB of memory at least, and this machine has "
            f"{machine_memory() / 1e9:,.0f} GB; {remedy}"
        )
