"""The memory that a process may use: the machine's, or that of its control group where a container limits it."""

from pathlib import Path

import pytest

from flsim.base import machine
from flsim.base.errors import InputError
from flsim.base.machine import machine_memory, refuse_beyond_memory

LIMIT = 1 << 20  # bytes; any machine has more


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/pod/a", "pod/a/memory.max"),  # version 2
        ("0::/not/visible/in/a/container", "memory.max"),
        ("3:cpu,cpuacct:/pod/a\n2:memory:/pod/a", "memory/pod/a/memory.limit_in_bytes"),  # version 1
    ],
)
def test_a_container_has_the_memory_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, file: str
) -> None:
    (tmp_path / "cgroup").write_text(f"{group}\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    whole = machine_memory()
    assert whole > LIMIT
    limit = tmp_path / file
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text("max\n")
    assert machine_memory() == whole
    limit.write_text(f"{LIMIT}\n")
    assert machine_memory() == LIMIT
    refuse_beyond_memory(LIMIT, "a model", "take a smaller one")
    with pytest.raises(InputError, match="a model needs 0 GB of memory at least, and this machine has 0 GB; take a"):
        refuse_beyond_memory(LIMIT + 1, "a model", "take a smaller one")
    limit.write_text("9" * 18)  # version 1 has a huge number for no limit
    assert machine_memory() == whole
