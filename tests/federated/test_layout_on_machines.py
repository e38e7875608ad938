"""Client processes, shards, users and evaluators on machines that are not here."""

from dataclasses import replace

import pytest

from flsim.base.errors import InputError
from flsim.runs.config import SystemHParams
from server.federated.layout import GPU, Layout, lay_out

EIGHT = {"CPU": 64.0, "GPU": 8.0}


def idle_gpus(layout: Layout) -> int:
    return sum(not gpu.clients for gpu in layout.gpus)


def test_eight_gpus_have_a_client_process_each_and_one_of_them_the_evaluator() -> None:
    layout = lay_out(SystemHParams(), [EIGHT], shards=8, population=1_000_001)
    assert layout.slots == layout.clients == (8,)
    assert (layout.shards_per_client, layout.users_per_shard) == (1, 125_001)
    assert (layout.client_gpus, layout.evaluator_gpus) == (0.95, 0.05)
    assert layout.evaluators == 1
    assert layout.gpus[0] == GPU(node=0, clients=1, evaluators=1, free=0.0)
    assert set(layout.gpus[1:]) == {GPU(node=0, clients=1, evaluators=0, free=0.05)}
    assert idle_gpus(layout) == 0


def test_fewer_shards_than_gpus_leave_gpus_idle() -> None:
    layout = lay_out(SystemHParams(), [EIGHT], shards=2, population=100)
    assert (layout.slots, layout.clients) == ((8,), (2,))
    assert idle_gpus(layout) == 6


def test_more_shards_than_gpus_are_served_one_after_another() -> None:
    layout = lay_out(SystemHParams(), [EIGHT], shards=20, population=100)
    assert layout.clients == (8,)
    assert (layout.shards_per_client, layout.users_per_shard) == (3, 5)


def test_two_client_processes_on_a_gpu_leave_room_for_two_evaluators() -> None:
    system = SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.1, evaluators=2)
    layout = lay_out(system, [EIGHT], shards=16, population=100)
    assert layout.clients == (16,)
    assert {gpu.clients for gpu in layout.gpus} == {2}
    assert layout.evaluators == 2
    assert layout.gpus[0] == GPU(node=0, clients=2, evaluators=2, free=0.0)


def test_an_evaluator_for_which_clients_leave_no_share_evaluates_on_a_cpu() -> None:
    system = SystemHParams(gpus_per_client=1.0)
    full = lay_out(system, [EIGHT], shards=8, population=100)
    assert (full.evaluators, full.evaluator_gpus) == (1, 0.0)
    assert set(full.gpus) == {GPU(node=0, clients=1, evaluators=0, free=0.0)}
    idle = lay_out(system, [EIGHT], shards=7, population=100)
    assert (idle.evaluators, idle.evaluator_gpus, idle.gpus[7].evaluators) == (1, 0.05, 1)
    assert lay_out(replace(system, gpus_for_evaluation=0.0), [EIGHT], shards=8, population=100).evaluators == 1


def test_evaluators_that_settings_put_on_full_gpus_find_none() -> None:
    system = SystemHParams(gpus_per_client=0.5, gpus_for_evaluation=0.25, evaluators=3)
    assert lay_out(system, [EIGHT], shards=16, population=100).evaluators == 0
    layout = lay_out(system, [EIGHT], shards=15, population=100)
    assert (layout.evaluators, layout.evaluator_gpus, layout.gpus[7].evaluators) == (2, 0.25, 2)


def test_nodes_are_filled_evenly_and_cpus_limit_too() -> None:
    small = {"CPU": 3.0, "GPU": 4.0}
    layout = lay_out(SystemHParams(), [EIGHT, small, {"CPU": 16.0}], shards=10, population=100)
    assert layout.slots == (8, 3, 0)
    assert layout.clients == (8, 2, 0)  # five on the first; then both have room for three, and take turns
    assert [gpu.node for gpu in layout.gpus] == 8 * [0] + 4 * [1]
    assert idle_gpus(layout) == 2


def test_a_client_of_two_gpus_holds_both_whole() -> None:
    layout = lay_out(SystemHParams(gpus_per_client=2.0, gpus_for_evaluation=0.0), [EIGHT], shards=8, population=100)
    assert layout.clients == (4,)
    assert {(gpu.clients, gpu.free) for gpu in layout.gpus} == {(1, 0.0)}


def test_machines_without_gpus_train_and_evaluate_on_cpus() -> None:
    layout = lay_out(SystemHParams(cpus_per_client=2), [{"CPU": 5.0}, {"CPU": 4.0}], shards=3, population=9)
    assert (layout.slots, layout.clients) == ((2, 2), (2, 1))
    assert (layout.gpus, layout.client_gpus, layout.evaluators) == ((), 0.0, 1)
    with pytest.raises(InputError, match=r"system\.shards must be between 1 and the 9 training users"):
        lay_out(SystemHParams(), [{"CPU": 1.0}], shards=10, population=9)
