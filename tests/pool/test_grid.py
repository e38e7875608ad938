"""How many client processes a machine has room for; the rest of the grid is in tests/faults and test_flower.py."""

from hypothesis import given
from hypothesis import strategies as st

from server.pool.grid import ClientShare, places

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
