"""The simulated disk, on steps that are written down here: what a loss of power can leave after each."""

from power.disk import Disk, Op, State

from flsim.base.rng import stream

WRITTEN = [Op("create", "new"), Op("write", "new", at=None, data=b"abcd")]
RENAMED = Op("rename", "new", to="file")


def left_by(*ops: Op) -> list[State]:
    disk = Disk()
    for op in ops:
        disk.apply(op)
    return list(disk.states(stream(0, "disk")))


def test_unsynced_bytes_are_there_in_part_and_unsynced_names_not_at_all() -> None:
    left = left_by(*WRITTEN)
    assert {} in left
    assert {state["new"] for state in left if state} == {b"abcd", b"", b"ab", b"\0\0\0\0", b"\0\0cd"}


def test_a_synced_file_is_whole_or_without_a_name_and_a_synced_folder_keeps_the_name() -> None:
    synced = Op("sync", "new", began=2)
    assert {*map(str, left_by(*WRITTEN, synced))} == {"{}", str({"new": b"abcd"})}
    folder = Op("sync", "", began=4)
    assert {*map(str, left_by(*WRITTEN, synced, RENAMED, folder))} == {str({"file": b"abcd"})}


def test_a_rename_that_is_not_synced_leaves_the_old_file_or_the_new_one() -> None:
    old = [Op("create", "file"), Op("write", "file", at=None, data=b"old"), Op("sync", "file", began=2)]
    new = [*WRITTEN, Op("sync", "new", began=6), RENAMED]
    left = left_by(*old, Op("sync", "", began=3), *new)
    assert {state["file"] for state in left} == {b"old", b"abcd"}
    unsynced = left_by(*old, Op("sync", "", began=3), *WRITTEN, RENAMED)
    assert b"" in {state["file"] for state in unsynced}, "bytes that were not synced before the rename"


def test_what_is_written_while_a_sync_runs_is_not_safe() -> None:
    late = [*WRITTEN, Op("sync", "new", began=1), Op("sync", "", began=3)]
    assert b"" in {state["new"] for state in left_by(*late)}


def test_a_removal_that_is_not_synced_may_be_undone_and_a_rename_to_another_folder_is_one_step() -> None:
    made = [Op("make", "a"), Op("make", "b"), Op("create", "a/x"), Op("sync", "", began=3), Op("sync", "a", began=4)]
    names = [sorted(state) for state in left_by(*made, Op("rename", "a/x", to="b/y"), Op("remove", "b/y"))]
    assert ["a", "a/x", "b"] in names
    assert ["a", "b"] in names
    assert ["a", "b", "b/y"] in names
    assert ["a", "a/x", "b", "b/y"] not in names
