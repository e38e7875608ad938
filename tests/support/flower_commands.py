"""Flower's own commands, in the form in which its users type them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil


@dataclass
class Flower:
    """Flower's commands with a separate home folder, so that no file of the user changes."""

    folder: Path
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        (self.folder / "home").mkdir()
        self.log = self.folder / "log"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # at 0.1, a SuperLink and two nodes use half a core
            "RAY_ADDRESS": "local",  # otherwise Flower's simulation joins any Ray cluster on this machine
        }

    def start(self, *command: str | Path, **environment: str | Path) -> subprocess.Popen[bytes]:
        """Start a command in the background, in `folder`; its output goes to the log."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(part) for part in command],
                cwd=self.folder,
                env=self.environment | {name: str(value) for name, value in environment.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def flwr(self, *arguments: str | Path, **environment: str) -> str:
        """Run one of Flower's commands, and return what it prints."""
        command = ["flwr", *map(str, arguments)]
        with self.log.open("ab") as log:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment | environment, stdout=subprocess.PIPE, stderr=log
            )
        said = done.stdout.decode()
        assert done.returncode == 0, said + self.output
        return said

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")[-20_000:]

    def is_up(self, port: str) -> bool:
        """Return whether a SuperLink answers on a port of this machine."""
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def processes(self) -> list[psutil.Process]:
        """Return all processes with a home in `folder`, whether this class or Flower started them."""
        return [each for each in psutil.process_iter() if _home_of(each).startswith(str(self.folder))]

    def close(self) -> None:
        for ending in (psutil.Process.terminate, psutil.Process.kill):
            processes = self.processes()
            for process in processes:
                try:
                    ending(process)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=15)


def _home_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("FLWR_HOME", "")
    except psutil.Error:
        return ""


def wait_until(true: Callable[[], bool], flower: Flower) -> None:
    until = time.monotonic() + 90
    while not true():
        assert time.monotonic() < until, flower.output
        time.sleep(0.1)
