"""What a run of a sweep holds of a cluster, and what becomes of one that cannot begin."""

from pathlib import Path

import pytest

from flsim.base.errors import InputError
from flsim.runs.config import (
    CentralConfig,
    CentralSystemHParams,
    Config,
    DataHParams,
    FederatedConfig,
    SystemHParams,
    dump,
)
from server.launch import refuse_what_does_not_fit, share
from server.sweep import Job, JobEnd, train_all

CPU_NODE, GPU_NODE = {"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}
DATA = DataHParams(Path("nowhere"))


def federated(**system: object) -> Config:
    return FederatedConfig(DATA, system=SystemHParams(**system))  # type: ignore[arg-type]


def central(**system: object) -> Config:
    return CentralConfig(DATA, system=CentralSystemHParams(**system))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "nodes", "expected"),
    [
        (federated(shards=3, cpus_per_client=2), [CPU_NODE], (6, 0)),
        (federated(), [CPU_NODE], (2, 0)),  # where the settings leave the shards open, as a run finds room for two
        (central(threads=2), [CPU_NODE], (2, 0)),
        # Shares of training and of evaluation: two such runs fit on a GPU beside each other, five of the next.
        (federated(shards=1, gpus_per_client=0.4, gpus_for_evaluation=0.1), [GPU_NODE], (1, 0.5)),
        (central(device="cuda", gpus=0.15, gpus_for_evaluation=0.05), [GPU_NODE], (1, 0.2)),
        (central(device="cuda"), [GPU_NODE], (1, 1)),  # by default all of one
        (federated(shards=1), [GPU_NODE], (1, 1)),
        (federated(shards=2, gpus_per_client=0.9, gpus_for_evaluation=0.1), [GPU_NODE], (2, 2)),  # Ray has no 1.9 GPUs
    ],
)
def test_a_run_holds_what_its_processes_take(
    config: Config, nodes: list[dict[str, float]], expected: tuple[int, float]
) -> None:
    assert share(config, nodes) == expected


@pytest.mark.parametrize(
    ("config", "needs", "remedy"),
    [
        (federated(shards=9), "9 CPUs and 0 GPUs", "lower the settings"),
        (
            federated(shards=1, gpus_per_client=0.4, gpus_for_evaluation=0.1),
            "1 CPUs and 0.5 GPUs",
            "--set system.gpus_per_client=0",
        ),
        (
            central(device="cuda", gpus=0.3, gpus_for_evaluation=0.1),
            "1 CPUs and 0.4 GPUs",
            "--set system.device=cpu --set system.gpus=0",
        ),
    ],
)
def test_what_no_machine_has_is_refused_and_says_what_to_set(config: Config, needs: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"^run a needs {needs}, but no Ray node has .*{remedy}$"):
        refuse_what_does_not_fit("a", config, [CPU_NODE])
    for on_cpus in (federated(shards=1, gpus_per_client=0), central(device="cpu", gpus=0)):
        refuse_what_does_not_fit("a", on_cpus, [CPU_NODE])


@pytest.mark.slow
def test_a_run_that_cannot_begin_says_why_and_the_next_one_is_tried(tmp_path: Path) -> None:
    """Real processes, one after another, without a cluster of the sweep's own."""
    jobs = []
    for name in ("one", "two"):
        config = FederatedConfig(DataHParams(tmp_path / f"corpus of {name}"))
        dump(config, tmp_path / f"{name}.toml")
        jobs.append(Job(name, config, tmp_path / f"{name}.toml", tmp_path / name, tmp_path / f"{name}.log"))
    ended = list(train_all(jobs, whole_cluster=True))
    assert [each.name for each in ended] == ["one", "two"]
    for job, each in zip(jobs, ended, strict=True):
        assert isinstance(each, JobEnd)
        assert each.failure is not None
        assert each.failure.startswith(f"{tmp_path / f'corpus of {job.name}'}: ")
        assert each.failure in job.log.read_text()
        assert not job.out.exists()
