"""Tables that flsim computes from stored runs equal the tables that were stored with them; see `frozen_results`."""

from pathlib import Path

import pytest
from frozen_results import EXACT, FROZEN, SWEEPS, TOLERANCE, assert_equal, frames_of, read, text_of, unpack


@pytest.mark.parametrize("sweep", SWEEPS)
def test_frames_of_stored_runs_equal_the_stored_frames(sweep: str, tmp_path: Path) -> None:
    folder, compared = unpack(sweep, tmp_path), set()
    for label, frame in frames_of(sweep, folder):
        frozen = read((FROZEN / sweep / f"{label}.csv").read_text(encoding="utf-8"))
        assert_equal(read(text_of(frame, folder)), frozen, TOLERANCE.get(f"{sweep}/{label}", EXACT), label)
        compared.add(label)
    assert compared == {path.stem for path in (FROZEN / sweep).glob("*.csv")}


def test_the_comparison_detects_changed_numbers_and_groups_and_ignores_wording() -> None:
    frozen = read("run,low,refuted\na,0.5,True\na,0.25,\nb,,False\n")
    assert_equal(read("refuted,low,run,new\nTrue,0.5,c,1\n,0.25,c,1\nFalse,,d,1\n"), frozen, EXACT, "wording")
    for text in (
        "run,low,refuted\na,0.500000001,True\na,0.25,\nb,,False\n",
        "run,low,refuted\na,0.5,False\na,0.25,\nb,,True\n",
        "run,low,refuted\na,0.5,True\nb,0.25,\nb,,False\n",
        "run,low,refuted\na,0.5,True\na,0.25,\nb,0.0,False\n",
        "run,low\na,0.5\na,0.25\nb,\n",
        "run,low,refuted\na,0.5,True\na,0.25,\n",
    ):
        with pytest.raises(AssertionError):
            assert_equal(read(text), frozen, EXACT, "changed")
