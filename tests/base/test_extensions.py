"""Tests of custom code: what a name resolves to, what its errors look like, and its copies in a run folder."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import (
    CustomName,
    by_content,
    custom_call_errors,
    custom_code_errors,
    resolve,
    short_name,
    source_digest,
)
from flsim.base.files import file_digest
from flsim.runs.config import custom_code

BUILT_IN: dict[str, object] = {"one": 1, "two": 2}


@dataclass(frozen=True)
class Inner:
    things: tuple[Annotated[str, CustomName("thing", BUILT_IN)], ...] = ()
    text: str = "mine.py:Thing"  # not marked as a custom name


@dataclass(frozen=True)
class Outer:
    thing: Annotated[str, CustomName("thing", BUILT_IN)] = "one"
    other: Annotated[str | None, CustomName("thing", BUILT_IN)] = None
    inner: Inner = field(default_factory=Inner)

    @property
    def digest(self) -> str:
        return json.dumps(custom_code.renamed(Outer, asdict(self), by_content))


def test_a_file_is_executed_once_for_its_content(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"print('executed')\nThing, Other = object(), '{tmp_path}'\n")
    (tmp_path / "copy.py").write_bytes(file.read_bytes())
    first = resolve(f"{file}:Thing", BUILT_IN, "thing")
    assert resolve(f"{tmp_path}/copy.py:Thing", BUILT_IN, "thing") is first
    assert resolve(f"{file}:Other", BUILT_IN, "thing") == str(tmp_path)
    assert resolve("two", BUILT_IN, "thing") == 2
    assert capfd.readouterr() == ("", "executed\n")
    file.write_text("Thing = 3\n")
    assert resolve(f"{file}:Thing", BUILT_IN, "thing") == 3
    assert source_digest(f"{file}:Thing") == file_digest(file)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".pyc"]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "three", "thing must be one of one, two, found 'three'; name custom code as path/to/file.py:NAME"),
        ("", "{folder}/no.py:Thing", "{folder}/no.py: no such file"),
        ("Other = 1", "{folder}/mine.py:Thing", "{folder}/mine.py: the file does not define Thing"),
        ("a = 1\nb = = 2\n", "{folder}/mine.py:Thing", "{folder}/mine.py:2: invalid syntax"),
        ("import json\njson.loads('{{')", "{folder}/mine.py:Thing", "{folder}/mine.py:2: JSONDecodeError: "),
        ("raise SystemExit(0)", "{folder}/mine.py:Thing", "{folder}/mine.py:1: SystemExit: 0"),
        ("\nimport neighbour", "{folder}/mine.py:Thing", "{folder}/mine.py:2: ModuleNotFoundError: No module named"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source.format())
    (tmp_path / "neighbour.py").touch()
    with pytest.raises(InputError, match=re.escape(message.format(folder=tmp_path))):
        resolve(name.format(folder=tmp_path), BUILT_IN, "thing")


def test_later_errors_name_the_innermost_line_of_the_custom_file(tmp_path: Path) -> None:
    """Errors of other code, and of flsim, do not change."""
    file = tmp_path / "mine.py"
    file.write_text("import json\ndef work():\n    return inner()\ndef inner():\n    return json.loads('?')\n")
    built_in: dict[str, Callable[[], object]] = {}
    work = resolve(f"{file}:work", built_in, "thing")
    with pytest.raises(RunFailed, match=re.escape(f"{file}:5: JSONDecodeError: Expecting value")), custom_code_errors():
        work()
    with pytest.raises(InputError, match=re.escape(f"{file}:5: ")), custom_code_errors(InputError):
        work()
    with pytest.raises(KeyError), custom_code_errors():
        raise KeyError("not theirs")


def test_a_name_by_content_resolves_only_to_the_original_content(tmp_path: Path) -> None:
    """The file is executed when the name is used, and not when the name is made."""
    path = tmp_path / "late.py"
    path.write_text("NUMBER = 7  # by content\n")
    name = by_content(f"{path}:NUMBER")
    assert by_content(name) == name
    assert (by_content("built-in"), short_name("built-in"), short_name(name)) == ("built-in", "built-in", "NUMBER")
    path.write_text("NUMBER = 8  # by content\n")
    with pytest.raises(InputError, match=r"late\.py: this file changed after .*; restore the file"):
        resolve(name, {}, "number")
    path.write_text("NUMBER = 7  # by content\n")
    assert resolve(name, {}, "number") == 7
    path.unlink()
    assert resolve(name, {}, "number") == 7  # from the earlier execution


def test_only_type_errors_of_custom_calls_become_input_errors() -> None:
    with (
        pytest.raises(InputError, match=r"^own\.py:F: odd; it needs f\(\)$"),
        custom_call_errors("own.py:F", "f()", InputError),
    ):
        raise TypeError("odd")
    with pytest.raises(TypeError), custom_call_errors("built-in", "f()", InputError):
        raise TypeError("odd")
    with pytest.raises(InputError, match=r"^mine$"), custom_call_errors("own.py:F", "f()"):
        raise InputError("mine")


def test_names_of_custom_code_are_changed_in_all_settings() -> None:
    values = {"thing": "a.py:A", "other": "two", "inner": {"things": ["b.py:B", "one"], "text": "c.py:C"}, "more": 1}
    assert custom_code.renamed(Outer, values, lambda name: custom_code.located(name, Path("/base"))) == {
        "thing": "/base/a.py:A",
        "other": "two",
        "inner": {"things": ["/base/b.py:B", "one"], "text": "c.py:C"},
        "more": 1,
    }
    assert custom_code.names_in(Outer("a.py:A", inner=Inner(("b.py:B", "one")))) == ["a.py:A", "b.py:B"]
    assert custom_code.relative("/base/code/a.py:A", Path("/base")) == "code/a.py:A"
    assert custom_code.relative("/other/a.py:A", Path("/base")) == "/other/a.py:A"


def test_copies_are_checked_by_their_names(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    run.mkdir()
    file.write_text("A = B = 1\n")
    settings = Outer(f"{file}:A", inner=Inner((f"{file}:B",)))
    copied = custom_code.with_copies(settings, run)
    (copy,) = (run / "code").iterdir()
    assert copy.name == f"mine.{file_digest(file)[:16]}.py"
    assert (copied.thing, copied.inner.things) == (f"{copy}:A", (f"{copy}:B",))
    assert custom_code.with_copies(copied, run) == copied
    custom_code.refuse_changed_copies(copied)
    custom_code.refuse_other_settings(copied, settings, run)
    file.write_text("A = B = 2\n")
    message = f"{run}: this run was started with another version of {file}, which is {copy}; resume with this version"
    with pytest.raises(InputError, match=re.escape(message)):
        custom_code.refuse_other_settings(copied, settings, run)
    file.write_text("A = B = 1\n")
    with pytest.raises(InputError, match=re.escape(": thing was 'mine")):
        custom_code.refuse_other_settings(copied, Outer("two", inner=copied.inner), run)
    copy.write_text("A = B = 3\n")
    with pytest.raises(InputError, match=re.escape(f"{copy}: the file changed after the run was started; restore")):
        custom_code.refuse_changed_copies(copied)
    copy.unlink()
    with pytest.raises(InputError, match=re.escape(f"{copy}: cannot be read (No such file or directory)")):
        custom_code.refuse_changed_copies(copied)
