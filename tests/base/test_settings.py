"""Each bound of each setting is enforced, in Python and in files, and an error names the setting and its value."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from flsim.attacks.extraction.extract import ExtractionHParams, Scheme
from flsim.attacks.membership.inference import AttackHParams
from flsim.base.errors import InputError
from flsim.base.settings import Count, settings
from flsim.canaries.defences import DeduplicationHParams, SanitizationHParams
from flsim.data.importing.gather import ImportHParams
from flsim.data.synthetic import SyntheticHParams
from flsim.runs.config import CentralConfig, DataHParams, FederatedConfig, parse
from flsim.runs.simulation import FedAvg
from flsim.runs.sweeps.definition import Range, SearchRule

REQUIRED: dict[type, dict[str, Any]] = {
    DataHParams: {"corpus": "c"},
    FederatedConfig: {"data": DataHParams("c")},
    CentralConfig: {"data": DataHParams("c")},
    Range: {"low": 0.1, "high": 1.0},
}
OTHERS = (
    *(AttackHParams, DeduplicationHParams, ExtractionHParams, FedAvg),
    *(ImportHParams, Range, SearchRule, SanitizationHParams, Scheme),
    SyntheticHParams,
)


def types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def sections(kind: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the prefix of the keys and the class of each section of a configuration."""
    yield prefix, kind
    for name, hint in types_of(kind).items():
        if is_dataclass(hint):
            yield from sections(hint, f"{name}.")  # type: ignore[arg-type]


def beyond(hint: Any) -> Iterator[float]:
    """Yield a value beyond each bound of a number."""
    if get_origin(hint) is Union:
        for part in get_args(hint):
            yield from beyond(part)
    for limit in (one for mark in getattr(hint, "__metadata__", ()) for one in getattr(mark, "metadata", ())):
        steps = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
        for item in fields(limit):
            if item.name in steps and get_origin(get_args(hint)[0]) is None:  # not the length of a list
                yield getattr(limit, item.name) + steps[item.name]


CONFIGURED = {kind for config in (FederatedConfig, CentralConfig) for _, kind in sections(config)}


@pytest.mark.parametrize("kind", sorted({*OTHERS, *CONFIGURED}, key=str), ids=lambda kind: kind.__name__)
def test_a_number_beyond_a_bound_is_refused(kind: type) -> None:
    for name, hint in types_of(kind).items():
        for value in beyond(hint):
            with pytest.raises(InputError, match=rf"^{name} must be .*, found {value:g}$"):
                kind(**REQUIRED.get(kind, {}) | {name: value})
            for wrong in (float("nan"), True, "3"):
                with pytest.raises(InputError, match=rf"^{name} must be .*, found {wrong!r}$"):
                    kind(**REQUIRED.get(kind, {}) | {name: wrong})


@pytest.mark.parametrize("kind", [FederatedConfig, CentralConfig])
def test_a_file_is_refused_with_the_key_and_the_value(kind: type) -> None:
    keys = [(f"{prefix}{name}", value) for prefix, part in sections(kind) for name, hint in types_of(part).items()
            for value in beyond(hint)]  # fmt: skip
    assert len(keys) > 40
    for key, value in keys:
        section, _, name = key.rpartition(".")
        values: dict[str, Any] = {"data": {"corpus": "c"}}
        (values.setdefault(section, {}) if section else values)[name] = value
        if kind is CentralConfig:
            values.setdefault("training", {})["kind"] = "central"
        with pytest.raises(InputError, match=rf"^run\.toml: {re.escape(key)} must be .*, found {value:g}$"):
            parse(values, "run.toml", Path())


def test_errors_of_a_class() -> None:
    @settings
    class Inner:
        count: Count = 1

    @settings
    class Outer:
        count: Count
        names: tuple[str, ...] = ()
        inner: Inner = field(default_factory=Inner)
        share: Annotated[float, "no bound"] = 0.5

    @dataclass(frozen=True)
    class Other:
        count: int = 1

    assert Outer(2, ["a"]).names == ("a",)  # type: ignore[arg-type]
    for arguments, message in (
        ({}, "count is missing"),
        ({"count": 2.5}, "count must be an integer, found 2.5"),
        ({"count": 2, "conut": 3}, "conut is not a setting"),
        ({"count": 2, "names": "a"}, "names must be a list, such as ['a'], found 'a'"),
        ({"count": 2, "names": [3]}, "names must be text, found 3"),
        ({"count": 2, "inner": Other()}, "inner must be a Inner, found a Other"),
        ({"count": 2, "share": float("inf")}, "share must be a finite number, found inf"),
    ):
        with pytest.raises(InputError) as caught:
            Outer(**arguments)
        assert str(caught.value) == message
    with pytest.raises(InputError, match=r"^count must be at least 1, found 0$"):
        Outer(0)
