"""Settings with the names that they had before: files that hold them are read, and digests of runs stay the same.

`data.partition` was `data.world`. The runs in tests/frozen were trained and stored before.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from frozen_results import unpack

from flsim.base.errors import InputError
from flsim.base.settings import with_former_names, with_present_names
from flsim.results.store import read_run_file, read_settings
from flsim.results.sweeps import read_sweep
from flsim.runs.config import files
from flsim.runs.folder import Run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"axes": {"data.world": ["iid"]}}, {"axes": {"data.partition": ["iid"]}}),
        ({"data": {"world": "iid", "corpus": "world"}}, {"data": {"partition": "iid", "corpus": "world"}}),
        ({"by": ["data.world", "local.world"]}, {"by": ["data.partition", "local.world"]}),
        ({"world": 1, "model": [{"data.world": 2}]}, {"world": 1, "model": [{"data.partition": 2}]}),
    ],
)
def test_former_names_are_renamed_and_nothing_else(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert with_present_names(old) == new
    assert with_former_names(new) == old


def test_a_configuration_has_either_name(tmp_path: Path) -> None:
    for number, line in enumerate(("", 'world = "iid"', 'partition = "iid"', 'world = "non-iid"')):
        (tmp_path / f"{number}.toml").write_text(f'[data]\ncorpus = "corpus"\n{line}\n')
    default, old, new, other = (files.load(tmp_path / f"{number}.toml") for number in range(4))
    assert old == new
    assert old.data.partition == "iid"
    assert default == other
    for override in ("data.world=iid", "data.partition=iid"):
        assert files.load(tmp_path / "3.toml", [override]) == new
    (tmp_path / "both.toml").write_text('[data]\ncorpus = "corpus"\nworld = "iid"\npartition = "iid"\n')
    with pytest.raises(InputError, match=r"both\.toml: world is the old name of partition, and both are set; remove"):
        files.load(tmp_path / "both.toml")


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_run_of_before_opens_with_its_digests(partition: str, tmp_path: Path) -> None:
    folder = unpack("worlds", tmp_path)
    path = folder / "runs" / f"fedavg-{partition}-seed0"
    stored = json.loads((path / "run.json").read_text())
    assert stored["world"] == json.loads((path / "planted" / "population.json").read_text())["world"] == partition
    run = Run.open(path)
    assert run.config.data.partition == read_run_file(path)["partition"] == partition
    assert read_settings(path)["data.partition"] == partition
    assert (run.config.digest, run.series) == (stored["config"], stored["series"])
    run.load(path / "checkpoints" / "round-000060.safetensors")  # of a run with the same digest, or it would be refused
    axes = {entry.name: entry.axes for entry in read_sweep(folder).runs}
    assert axes[path.name] == {"data.partition": partition}
