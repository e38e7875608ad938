"""Files and folders are complete or absent, whatever fails while they are written; and tests of files of JSON lines."""

import os
import platform
import shutil
import stat
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread

import numpy as np
import pytest
import torch
from raynodes import older_release

from flsim.base import files
from flsim.base.errors import InputError
from flsim.base.files import (
    TAIL,
    NewLines,
    held,
    last_line,
    named_file,
    naming,
    new_file,
    new_folder,
    read_lines,
    remove_abandoned,
)
from flsim.base.machine import PACKAGES, code_digest, versions


def test_folders_of_killed_processes_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    """Both processes make the same folder."""
    made = tmp_path / "made"
    code = """
import os, sys
from pathlib import Path
from flsim.base.files import new_folder
with new_folder(Path("made")) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with Popen(command, cwd=tmp_path, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = tmp_path / other.stdout.readline().strip()
        with new_folder(made):
            assert (theirs / "half").exists()
        made.rmdir()
        other.kill()
    assert [*tmp_path.iterdir()] == [theirs]
    with new_folder(made):
        assert not theirs.exists()
    assert [*tmp_path.iterdir()] == [made]


@pytest.mark.parametrize("name", ["a\nb", "a\udce9"])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be printed"), new_folder(tmp_path / name):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_taken_for_abandoned_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks at the folder after the folder is made, and before it is locked."""
    begun: list[Path] = []

    def late(path: Path) -> AbstractContextManager[None]:
        begun.append(path)
        if len(begun) == 1:
            path.rmdir()
        elif len(begun) == 2:
            raise BlockingIOError
        return held(path)

    monkeypatch.setattr(files, "held", late)
    with new_folder(tmp_path / "new") as folder:
        (folder / "one").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one"]
    assert len(begun) == 3


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def overtake() -> None:
        with new_folder(tmp_path / "made") as folder:
            (folder / "ours").write_text("ours")
            (tmp_path / "made").mkdir()
            (tmp_path / "made" / "theirs").write_text("theirs")

    with pytest.raises(InputError, match="already exists"):
        overtake()
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]


def fail_within(block: AbstractContextManager[Path], name: str) -> None:
    with block as partial:
        (partial / name).write_text("half")
        raise ZeroDivisionError


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    """Two writers of one file, such as threads, or processes of two machines with equal ids, use separate files."""
    path = tmp_path / "file"
    path.write_text("old")
    for block, name in ((new_folder(tmp_path / "made"), "half"), (new_file(path), "")):
        with pytest.raises(ZeroDivisionError):
            fail_within(block, name)
    assert path.read_text() == "old"
    with new_file(path) as first:
        first.write_text("first, half")
        with new_file(path) as second:
            second.write_text("second")
            assert first.read_text() == "first, half"
        assert path.read_text() == "second"
        first.write_text("first, whole")
    assert path.read_text() == "first, whole"
    assert list(tmp_path.iterdir()) == [path]


def test_partial_files_are_removed_once_their_process_has_ended(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from flsim.base.files import new_file
with new_file(Path("file")) as partial:
    print(partial, flush=True)
    sys.stdin.read()
"""
    with Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = tmp_path / other.stdout.readline().strip()
        remove_abandoned(tmp_path)
        assert theirs.exists()
        other.kill()
    assert theirs.exists()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("no/such/file")
    for place, message in (
        (tmp_path / "loop", "loop: cannot be written"),
        (tmp_path / "gone", "gone: the folder .* does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "file", "does not exist; create it first"),
        (tmp_path / "file" / "file", "does not exist; create it first"),
        (Path("/proc/file"), "cannot be written"),
    ):
        with pytest.raises(InputError, match=message), named_file(place):
            pass
    assert (tmp_path / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop", "gone"}


def test_a_failed_write_names_the_file_that_it_failed_at(tmp_path: Path) -> None:
    """The errors are real, of a device that is always full; numpy's error does not even have an error number."""

    def write() -> None:
        with Path("/dev/full").open("w") as device:
            device.write("text")

    def write_array() -> None:
        with Path("/dev/full").open("wb", buffering=0) as device:
            np.zeros(1 << 20).tofile(device)

    for fail, reason in ((write, "No space left on device"), (write_array, "1048576 requested and 0 written")):
        for block in (naming(tmp_path / "file"), new_file(tmp_path / "file")):
            with pytest.raises(OSError, match=reason) as raised, block:
                fail()
            assert (raised.value.filename, raised.value.strerror) == (str(tmp_path / "file"), reason)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_awaited_and_missing_if_its_file_was_removed(tmp_path: Path) -> None:
    lock, outcomes = tmp_path / "lock", list[str]()
    lock.touch()

    def wait() -> None:
        try:
            with held(lock, wait=True):
                outcomes.append("held")
        except FileNotFoundError:
            outcomes.append("gone")

    for expected in ("held", "gone"):
        waiting = Thread(target=wait)
        with held(lock):
            with pytest.raises(BlockingIOError), held(lock):
                pass
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            if expected == "gone":
                lock.unlink()
                lock.touch()
        waiting.join()
        assert outcomes[-1] == expected


def test_a_device_gets_the_bytes_and_stays_a_device(tmp_path: Path) -> None:
    """The test uses a terminal, which is a character device that the user who runs the test may write to."""
    seen, terminal = os.openpty()
    path = Path(os.ttyname(terminal))
    (tmp_path / "link").symlink_to(path)
    for place in (path, tmp_path / "link"):
        with named_file(place) as partial:
            partial.write_text("table")
        assert os.read(seen, 100) == b"table"
        assert stat.S_ISCHR(path.stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    os.close(terminal)
    os.close(seen)


WRITE = "from pathlib import Path\nfrom flsim.base.files import named_file\n"
WRITE += "with named_file(Path('/dev/stdout')) as partial: partial.write_text('table')"


def test_standard_output_may_be_a_pipe_or_a_file(tmp_path: Path) -> None:
    """`>> notes.txt` appends, as for other programs."""
    command = [sys.executable, "-c", WRITE]
    with Popen(command, stdout=PIPE) as process:
        assert process.communicate()[0] == b"table"
    notes = tmp_path / "notes.txt"
    notes.write_text("notes, ")
    inode = notes.stat().st_ino
    with notes.open("ab") as file, Popen(command, stdout=file) as process:
        process.wait()
    assert notes.read_text() == "notes, table"
    assert notes.stat().st_ino == inode


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link, second = tmp_path / "far" / "real.csv", tmp_path / "link.csv", tmp_path / "second.csv"
    link.symlink_to("far/real.csv")
    second.symlink_to("link.csv")
    for text in ("new", "newer"):  # at first, the file does not exist
        with named_file(second) as partial:
            assert partial.parent == tmp_path / "far"
            partial.write_text(text)
        assert real.read_text() == text
        assert link.is_symlink()
        assert second.is_symlink()


@pytest.mark.parametrize("mode", [0o640, 0o444])
def test_a_file_that_exists_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    path.chmod(mode)
    with named_file(path) as partial:
        assert not stat.S_IMODE(partial.stat().st_mode) & ~(mode | stat.S_IWUSR)
        partial.write_text("new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


# Files of JSON lines, which are read while another process writes them.


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert [*read_lines(path)] == []
    path.write_bytes(b'{"round": 1}\n\xff\n{"rou\n3\n{"round": 4}')
    assert [*read_lines(path)] == [{"round": 1}, 3, {"round": 4}]


def test_the_last_line_may_be_longer_than_what_is_first_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert last_line(path) is None
    for before in (b"", b"1\n", b"1\n" * TAIL):
        path.write_bytes(before)
        assert last_line(path) == (1 if before else None)
        path.write_bytes(before + b'"cut')
        assert last_line(path) is None
        for length in (9, TAIL - 2, TAIL - 1, TAIL, TAIL + 1, 2 * TAIL, 2 * TAIL + 1, 5 * TAIL):
            for end in (b"", b"\n"):
                path.write_bytes(before + b'"' + b"a" * (length - 2) + b'"' + end)
                assert last_line(path) == "a" * (length - 2)


def test_each_line_is_read_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = NewLines(path)
    assert lines.take() == []
    path.write_text('{"round": 1}\n{"rou')
    assert lines.take() == [{"round": 1}]
    with path.open("a") as file:
        file.write('nd": 2}\n')
    assert lines.take() == [{"round": 2}]
    assert lines.take() == []
    replaced = tmp_path / "other"
    replaced.write_text('{"round": 7}\n')
    replaced.replace(path)
    assert lines.take() == [{"round": 7}]


ROOT = Path(__file__).parents[2]


def digest_in(folder: Path) -> str:
    """Return the digest of the code in a folder, which a process computes after importing the code from this folder."""
    done = subprocess.run(
        [sys.executable, "-c", "from flsim.base import machine; print(machine.__file__, machine.code_digest())"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    where, digest = done.stdout.split()
    assert Path(where).is_relative_to(folder)
    return digest


def test_versions_are_those_that_are_imported(tmp_path: Path) -> None:
    here = versions()
    assert here["python"] == platform.python_version()
    assert here["numpy"] == np.__version__
    assert here["torch"] == torch.__version__
    assert here["flsim"] == code_digest()
    code = "from flsim.base.machine import versions; print(versions()['scipy'])"
    environment = {**os.environ, "PYTHONPATH": f"{older_release(tmp_path, 'scipy')}:{ROOT}"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "0.1\n"


def test_a_digest_depends_only_on_names_and_source(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    first = digest_in(tmp_path)
    (tmp_path / "server" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "server" / "__pycache__" / "left.pyc").touch()
    assert digest_in(tmp_path) == first  # files that Python makes are not source
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in PACKAGES:
        (tmp_path / name).rename(moved / name)
    assert digest_in(moved) == first
    source = moved / "clients" / "app.py"
    source.write_text(source.read_text() + "\n")
    changed = digest_in(moved)
    assert changed != first
    source.rename(source.with_name("other.py"))
    assert digest_in(moved) not in {first, changed}
