"""Shares of GPUs; the rest of launching is in test_flower.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.runs.config import SystemHParams
from server.federated.launch import client_gpu_shares, gpus_of_evaluators, refuse_tf32_without_gpu, take_gpus
from server.pool.grid import ClientShare, places


@given(gpus=st.lists(st.integers(0, 16), min_size=1, max_size=4).filter(any))
def test_by_default_there_is_a_client_per_gpu_and_room_for_the_evaluator(gpus: list[int]) -> None:
    """Flower makes int(GPUs / share) clients of each node; each must fit on a GPU of its own, and so must the rest."""
    client, evaluation = client_gpu_shares(SystemHParams(), [float(count) for count in gpus])
    assert [int(count / client) for count in gpus] == gpus
    assert client > 0.5
    assert client + evaluation == pytest.approx(1)


def test_what_is_asked_for_is_given() -> None:
    asked = SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.2)
    assert client_gpu_shares(asked, [1.0]) == (0.4, 0.2)
    assert client_gpu_shares(SystemHParams(gpus_per_client=0, gpus_for_evaluation=1), [1.0]) == (0, 1)
    assert client_gpu_shares(SystemHParams(gpus_for_evaluation=0), [1.0]) == (1.0, 0)


def test_tf32_is_refused_where_clients_train_on_cpus() -> None:
    refuse_tf32_without_gpu("tf32", 0.95)
    refuse_tf32_without_gpu("bf16", 0.0)
    with pytest.raises(InputError, match='"tf32" needs an NVIDIA GPU'):
        refuse_tf32_without_gpu("tf32", 0.0)


EIGHT = {"CPU": 64.0, "GPU": 8.0}
ALL_HELD = "one: clients of system.gpus_per_client = 1 use all GPUs, so evaluators run on CPUs"


@pytest.mark.parametrize(
    ("system", "nodes", "shards", "expected"),
    [
        (SystemHParams(), [EIGHT], 8, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT], 7, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT], 8, ALL_HELD),
        (SystemHParams(gpus_per_client=2.0), [EIGHT], 8, ALL_HELD.replace("= 1", "= 2")),
        (SystemHParams(gpus_per_client=2.0), [EIGHT], 3, 0.05),
        (SystemHParams(gpus_per_client=1.0), [EIGHT, {"CPU": 3.0, "GPU": 4.0}], 20, 0.05),  # three CPUs for four GPUs
        (SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.0), [EIGHT], 8, 0.0),
        (SystemHParams(gpus_per_client=1.0), [{"CPU": 4.0}], 2, 0.0),
        (SystemHParams(gpus_per_client=0.4, gpus_for_evaluation=0.1, evaluators=2), [EIGHT], 16, 0.1),
    ],
)
def test_evaluators_use_the_gpus_that_clients_leave_and_cpus_otherwise(
    system: SystemHParams,
    nodes: list[dict[str, float]],
    shards: int,
    expected: float | str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus, printed = gpus_of_evaluators("one", system, nodes, shards), capsys.readouterr().err
    if isinstance(expected, str):
        assert (gpus, printed.startswith(expected), printed.count("\n")) == (0.0, True, 1)
    else:
        assert (gpus, printed) == (expected, "")


@pytest.mark.parametrize(
    ("system", "shards", "message"),
    [
        (SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.1), 8, r"0 of 1 evaluators of .* = 0\.1; lower one"),
        (SystemHParams(gpus_per_client=0.5, gpus_for_evaluation=0.25, evaluators=3), 16, "GPUs for 0 of 3 evaluators"),
        (SystemHParams(gpus_per_client=0.5, gpus_for_evaluation=0.25, evaluators=3), 15, "GPUs for 2 of 3 evaluators"),
    ],
)
def test_evaluators_for_which_settings_leave_no_gpu_are_refused(
    system: SystemHParams, shards: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        gpus_of_evaluators("one", system, [EIGHT], shards)


def test_processes_fill_a_gpu_before_the_next_or_hold_several_whole() -> None:
    free = [1.0] * 3
    assert take_gpus(free, 0.4, 3) == 3
    assert free == pytest.approx([0.2, 0.6, 1.0])
    assert (take_gpus(free, 2.0, 1), take_gpus(free, 0.0, 5)) == (0, 0)
    free = [1.0] * 3
    assert (take_gpus(free, 2.0, 2), free) == (1, [0.0, 0.0, 1.0])


# How many client processes a machine has room for; the rest of the grid is in tests/faults and test_flower.py.


SHARES = st.sampled_from([1.0, 0.95, 0.5, 0.4, 0.25, 0.2, 0.1])


@given(cpus=st.integers(0, 64), gpus=st.integers(0, 8), each=st.integers(1, 8), share=SHARES)
def test_as_many_as_fit_and_no_more(cpus: int, gpus: int, each: int, share: float) -> None:
    """Shares of GPUs are taken of one GPU each; hundredths, as Ray counts them."""
    on_cpus = ClientShare(each).fits({"CPU": float(cpus)})
    assert on_cpus * each <= cpus < (on_cpus + 1) * each
    both = ClientShare(each, share).fits({"CPU": float(cpus), "GPU": float(gpus)})
    assert both == min(on_cpus, gpus * (100 // round(100 * share)))


def test_whole_gpus_and_several() -> None:
    assert [ClientShare(1, 2.0).fits({"CPU": 64.0, "GPU": gpus}) for gpus in (1.0, 2.0, 5.0)] == [0, 1, 2]


@given(room=st.dictionaries(st.integers(0, 9), st.integers(-2, 5)), processes=st.integers(-1, 30))
def test_processes_go_where_most_room_is(room: dict[int, int], processes: int) -> None:
    """A machine that is already overfull gets none; where room is equal the first machine gets the process."""
    machines = places(room, processes)
    assert len(machines) == min(max(processes, 0), sum(max(count, 0) for count in room.values()))
    left = dict(room)
    for machine in machines:
        assert left[machine] == max(left.values())
        left[machine] -= 1
