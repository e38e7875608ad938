"""Shares of GPUs; the rest of launching is in test_flower.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.runs.config import SystemHParams
from server.federated.launch import gpus_of_evaluators, refuse_tf32_without_gpu
from server.federated.layout import client_gpu_shares, lay_out


def test_without_gpus_nobody_gets_any() -> None:
    assert client_gpu_shares(SystemHParams(), [0.0, 0.0]) == (0.0, 0.0)


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


def test_evaluators_whom_clients_leave_no_gpu_use_cpus_or_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [{"CPU": 64.0, "GPU": 8.0}]

    def of(system: SystemHParams, shards: int) -> float:
        return gpus_of_evaluators("one", system, lay_out(system, gpus, shards, 100))

    whole = SystemHParams(gpus_per_client=1.0)
    assert of(whole, 8) == 0.0
    assert capsys.readouterr().err == (
        "one: clients of system.gpus_per_client = 1 hold all GPUs, so evaluators run on CPUs; leave gpus_per_client "
        "unset to evaluate on GPUs\n"
    )
    assert (of(whole, 7), of(SystemHParams(), 8)) == (0.05, 0.05)
    assert of(SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.0), 8) == 0.0
    assert gpus_of_evaluators("one", whole, lay_out(whole, [{"CPU": 4.0}], 2, 100)) == 0.0
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match=r"= 1 leave GPUs for 0 of 1 evaluators of .* = 0\.1; lower one"):
        of(SystemHParams(gpus_per_client=1.0, gpus_for_evaluation=0.1), 8)
