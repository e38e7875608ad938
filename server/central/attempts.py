"""One attempt to train a central run on the Ray cluster, as one task or by Ray Train's workers."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flsim.base.errors import InputError, is_out_of_memory
from flsim.base.progress import say
from flsim.runs.config import CentralSystemHParams
from server.central.steps import Lost, News, train
from server.central.workers import train_together
from server.cluster.causes import death

LOOK = 0.2  # seconds between two items of the iterator
PATIENCE = 3.0  # seconds until a message says that others hold the resources of the training


def attempt(path: Path, name: str, system: CentralSystemHParams, gpus: float) -> Generator[News | None]:
    """Train a run until it ends; closing the iterator ends the training.

    Args:
        path: the run's folder, which all nodes see.
        name: name of the run.
        system: system settings of the run.
        gpus: GPUs of each training process.

    Yields:
        News, and every now and then None where there is none.

    Raises:
        Lost: a process died, or ran out of memory; the newest checkpoint is good.
        Exception: training raised this error.
    """
    resources = {"CPU": float(system.threads)} | ({"GPU": gpus} if gpus else {})
    group, stream = placement_group([resources] * system.workers), None
    try:
        waited, patience = 0.0, PATIENCE
        while not group.wait(LOOK):
            waited += LOOK
            if waited >= patience:
                say(f"{name}: waits for {_in_words(system, gpus)}")
                patience = float("inf")
            yield None
        if system.workers == 1:
            options = {"num_cpus": system.threads, "num_gpus": gpus}
            options |= {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
            task = partial(ray.remote(train).options, **options)
        else:
            remove_placement_group(group)  # Ray Train makes its own one
            task = partial(ray.remote(train_together).options, num_cpus=0)
        stream = task(num_returns="streaming", max_retries=0).remote(path, gpus)
        while True:
            if not ray.wait([stream], timeout=LOOK)[0]:
                yield None
                continue
            try:
                news = ray.get(next(stream))
            except StopIteration:
                return
            yield news
    except RayTaskError as error:
        if error.cause and is_out_of_memory(error.cause):
            raise Lost(f"{type(error.cause).__name__}: {error.cause}") from error
        raise (error.cause or error) from error
    except RayError as error:
        raise Lost(death(error)) from error
    finally:
        if stream is not None:
            ray.cancel(stream, force=True)
        _give_back()


def _give_back() -> None:
    """Release this driver's reservations; those of Ray Train would outlive its task where the task is killed."""
    job = ray.get_runtime_context().get_job_id()
    for name, about in placement_group_table().items():
        if name.endswith(job) and about["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))


def refuse_what_does_not_fit(system: CentralSystemHParams, gpus: float, nodes: list[dict[str, float]]) -> None:
    """Raise InputError where the training would wait for ever on nodes with these resources."""
    if gpus and not any(node.get("GPU") for node in nodes):
        raise InputError('system.device is "cuda", but no Ray node has a GPU; set system.device = "cpu"')
    room = sum(
        min(
            int(node.get("CPU", 0) // system.threads),
            int(node.get("GPU", 0)) * int(1 / gpus) if gpus else system.workers,
        )
        for node in nodes
    )
    if room < system.workers:
        raise InputError(
            f"training needs {_in_words(system, gpus)}, and the Ray nodes have room for {room} of {system.workers} "
            f"processes; lower system.threads, system.gpus or system.workers"
        )


def _in_words(system: CentralSystemHParams, gpus: float) -> str:
    process = f"{system.threads} CPU{'s' * (system.threads != 1)}" + (f" and {gpus:g} GPUs" if gpus else "")
    return process if system.workers == 1 else f"{system.workers} times {process}"
