"""Two machines, emulated with network namespaces and a process that carries packets between their TUN devices."""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMESPACES = Path("/run/netns")
CLONE_NEWNET, TUNSETIFF, TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001
DEVICE, PACKET = "line", 65_536
HOSTS = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Line:
    """The connection of two machines."""

    cut: Path  # no packet arrives while this file exists
    within: tuple[tuple[str, ...], tuple[str, ...]]  # the first words of a command that runs on each machine


@contextmanager
def joined_machines(folder: Path, delay: float, loss: float) -> Iterator[Line]:
    """Connect two namespaces with the addresses `HOSTS`, with a delay in seconds each way and a rate of packet loss."""
    names = [f"flsim-{os.getpid()}-{side}" for side in "ab"]
    cut = folder / "cut"
    try:
        for name in names:
            if why := _ip("netns", "add", name):
                pytest.skip(f"no network namespace can be made here: {why}")
        command = [sys.executable, __file__, *names, str(delay), str(loss), str(cut)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as line:
            try:
                assert line.stdout is not None
                if line.stdout.readline() != "up\n":
                    pytest.skip("no TUN device can be made here")
                for name, host in zip(names, HOSTS, strict=True):
                    for words in (
                        ("link", "set", "lo", "up"),
                        ("addr", "add", f"{host}/24", "dev", DEVICE),
                        ("link", "set", DEVICE, "up"),
                        ("route", "add", "default", "dev", DEVICE),  # Ray uses the address of this route
                    ):
                        assert not _ip("-n", name, *words)
                first, second = (("nsenter", f"--net={NAMESPACES / name}") for name in names)
                yield Line(cut, (first, second))
            finally:
                line.kill()
    finally:
        for name in names:
            _ip("netns", "del", name)


def _ip(*words: str) -> str:
    """Run an `ip` command, and return its error message; "" if it succeeded."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def _device(name: str) -> int:
    """Open a TUN device in a namespace; this process stays in the namespace."""
    with (NAMESPACES / name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), TUN_WITHOUT_HEADER))
    return device


def carry(first: int, second: int, delay: float, loss: float, cut: Path) -> None:
    """Carry packets in both directions, without end."""
    other, chance = {first: second, second: first}, random.Random(0)
    on_the_way: list[tuple[float, int, int, bytes]] = []
    sent = 0
    while True:
        timeout = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for device in select.select(list(other), [], [], timeout)[0]:
            packet = os.read(device, PACKET)
            if chance.random() >= loss and not cut.exists():
                heapq.heappush(on_the_way, (time.monotonic() + delay, sent := sent + 1, other[device], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            *_, device, packet = heapq.heappop(on_the_way)
            with suppress(OSError):  # a device that is not up yet
                os.write(device, packet)


if __name__ == "__main__":
    names, (delay, loss), cut = sys.argv[1:3], map(float, sys.argv[3:5]), Path(sys.argv[5])
    first, second = (_device(name) for name in names)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    carry(first, second, delay, loss, cut)
