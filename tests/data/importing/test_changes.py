"""Sources whose content changes while they are read are refused, whatever their times say, and nothing is left."""

import bz2
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from dumps import folder_bytes, write_jsonl
from imports import Imports, kill

from flsim.base.errors import InputError
from flsim.data.formats.wordcount import read_word_count
from flsim.data.importing import run
from flsim.data.importing.gather import ImportHParams
from flsim.data.importing.run import import_corpus


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """In place, as `dd conv=notrunc` does."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, data, offset)
    os.close(descriptor)


def overwrite_mapped(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[offset : offset + len(data)] = data


def first_word(path: Path, posts: int) -> int:
    """Where the first word after so many posts is."""
    return sum(map(len, path.read_bytes().splitlines(keepends=True)[:posts])) + len('{"user": 10, "text": "')


def at_start(path: Path) -> None:
    overwrite(path, first_word(path, 0), b"z")


def at_end(path: Path) -> None:
    overwrite(path, first_word(path, 599), b"z")


def mapped(path: Path) -> None:
    overwrite_mapped(path, first_word(path, 599), b"z")


def damaged(path: Path) -> None:
    overwrite(path, first_word(path, 599) - 9, b"{{{")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 5)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"user": 1, "text": "one more"}\n')


def keeping_times(change: Callable[[Path], None], path: Path) -> None:
    about = path.stat()
    change(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def assert_refused(imports: Imports, said: str, name: str) -> None:
    assert said.splitlines()[-1] == f"flsim: {imports.folder / name}: changed while it was read; import it again"
    assert not imports.out.exists()
    assert not imports.scratch.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("pieces", "name"), [(6, "one"), (4, "three")])  # the plan, 3 hashes, and 2 or 0 parts
@pytest.mark.parametrize("change", [at_start, at_end, mapped, damaged, cut, grown])
def test_a_source_that_changes_is_refused(
    imports: Imports, pieces: int, name: str, change: Callable[[Path], None]
) -> None:
    process = imports.started(pieces, further=0)
    keeping_times(change, imports.folder / f"{name}.jsonl")
    imports.go()
    assert_refused(imports, imports.finish(process, code=2), f"{name}.jsonl")


def test_a_change_between_an_interruption_and_the_rest_is_refused(imports: Imports) -> None:
    kill(imports.started(6, further=0))
    keeping_times(at_end, imports.folder / "three.jsonl")
    assert_refused(imports, imports.finish(imports.start(), code=2), "three.jsonl")


def test_a_compressed_source_is_of_one_content(imports: Imports) -> None:
    packed = imports.folder / "one.jsonl.bz2"
    packed.write_bytes(bz2.compress(imports.sources[0].read_bytes()))
    process = imports.started(2, packed, further=0)
    keeping_times(lambda path: overwrite(path, 4, b"?"), packed)
    imports.go()
    assert_refused(imports, imports.finish(process, code=2), packed.name)


def test_another_name_or_permission_is_no_change(imports: Imports, expected: dict[str, bytes]) -> None:
    process = imports.started(6, further=0)
    for source in imports.sources:
        source.chmod(0o600)
        source.with_suffix(".link").hardlink_to(source)
    imports.go()
    imports.finish(process)
    assert folder_bytes(imports.out) == expected


@pytest.mark.parametrize("damage", [False, True])
def test_a_vocabulary_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bool
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [(1, "a b c d. " * 9)])
    words = tmp_path / "words.txt"
    words.write_text("a 9\nb 8\nc 7\nd 6\n")

    def read(path: Path, size: int, fit: bool) -> object:
        found = None if damage else read_word_count(path, size, fit)
        keeping_times(lambda path: overwrite_mapped(path, 4, b"\n" if damage else b"e"), path)
        return found or read_word_count(path, size, fit)

    monkeypatch.setattr(run, "read_word_count", read)
    with pytest.raises(InputError, match=r"words\.txt: changed while it was read; import it again"):
        import_corpus([source], tmp_path / "out", ImportHParams(8, 6, 12, 0.0, 0.0), vocabulary_from=words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "words.txt"]


def test_a_vocabulary_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [(1, "a b c d. " * 9)])
    with pytest.raises(InputError, match=r"no\.txt: cannot be read \(No such file or directory\)"):
        import_corpus([source], tmp_path / "out", ImportHParams(), vocabulary_from=tmp_path / "no.txt")
