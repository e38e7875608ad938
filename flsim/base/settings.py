"""Classes of settings, whose fields carry their bounds for pydantic, and nested mappings of settings."""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Number, Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

from flsim.base.errors import InputError

pydantic: Any
try:
    import pydantic
except ModuleNotFoundError:
    pydantic = None

Kind = TypeVar("Kind")


def bounds(**limits: Any) -> object:
    """Return the annotation of a field's bounds, named as in pydantic: gt, ge, lt, le, min_length, allow_inf_nan."""
    return pydantic and pydantic.Field(**limits)


def check(function: Callable[[Any], Any]) -> object:
    """Return the annotation of a field that a function validates; its ValueError begins with "must"."""
    return pydantic and pydantic.AfterValidator(function)


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _different(values: Any) -> Any:
    if len(set(values)) < len(values):
        raise ValueError("must list different values")
    return values


def _options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in options.items():
        if not key.isidentifier():
            raise ValueError(f"{key!r} is not a valid name of an argument; use letters, digits and _")
        if not isinstance(value, str) and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"{key} must be text, true, false or a finite number, found {value!r}")
    return options


NUMBER = pydantic and pydantic.BeforeValidator(_no_truth_value)
DIFFERENT = check(_different)
Flag = Annotated[bool, pydantic and pydantic.Strict()]  # true or false, and no number
Whole = Annotated[int, NUMBER]
Natural = Annotated[int, bounds(ge=0), NUMBER]
Count = Annotated[int, bounds(ge=1), NUMBER]
Finite = Annotated[float, NUMBER]
NotNegative = Annotated[float, bounds(ge=0), NUMBER]
Positive = Annotated[float, bounds(gt=0), NUMBER]
Fraction = Annotated[float, bounds(ge=0, lt=1), NUMBER]  # at least 0 and below 1
Probability = Annotated[float, bounds(gt=0, le=1), NUMBER]
Level = Annotated[float, bounds(gt=0, lt=1), NUMBER]  # such as delta or a quantile
Seconds = Annotated[float, bounds(gt=0, allow_inf_nan=True), NUMBER]
Options = Annotated[Mapping[str, Any], check(_options)]  # options of custom code


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen dataclass, whose fields are checked against their declarations.

    Checks of several fields are in `__post_init__` of the class, which runs after each field is valid. An unknown
    field, and a number that is not finite, are errors. Every error is an InputError that names the field and its value.
    """
    if pydantic is None:
        return dataclass(frozen=True)(kind)
    from pydantic.dataclasses import dataclass as with_schema
    from pydantic_core import ArgsKwargs

    config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    made: Any = with_schema(kind, frozen=True, config=config)

    @wraps(made.__init__)
    def init(self: Any, *args: Any, **options: Any) -> None:
        arguments = ArgsKwargs(tuple(map(_plain, args)), {name: _plain(value) for name, value in options.items()})
        try:
            type(self).__pydantic_validator__.validate_python(arguments, self_instance=self, strict=True)
        except pydantic.ValidationError as error:
            raise input_error(error, kind) from error

    made.__init__ = init
    types, as_declared = get_type_hints(made), inspect.signature(made)
    plain = [value.replace(annotation=types[name]) for name, value in as_declared.parameters.items()]
    made.__signature__ = as_declared.replace(parameters=plain)  # `help` then shows types without the bounds
    return made  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Return numbers of numpy as Python's, and lists as tuples."""
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


SENTENCES = {  # by the type of error in pydantic
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dataclass_exact_type": "must be a {class_name}",
    "dataclass_type": "must be a table",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "is_instance_of": "must be a {class}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "mapping_type": "must be a table",
    "missing": "is missing",
    "string_too_short": "must have at least {min_length} character",
    "string_type": "must be text",
    "too_short": "must list at least {min_length} value",
    "tuple_type": "must be a list, such as [{input}]",
    "unexpected_keyword_argument": "is not a setting",
    "value_error": "{error}",
}


def input_error(error: Any, kind: type, source: str = "") -> InputError:
    """Return the first error of a pydantic.ValidationError in one line, with the place and the value that was found.

    If a value is missing, all missing ones are named.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    context, loc, value = first.get("ctx", {}), list(first["loc"]), text_of(first["input"])
    if loc and isinstance(loc[0], int):
        loc[0] = fields(kind)[loc[0]].name
    # parts with brackets are pydantic's names of the types of a union, not keys
    place = ".".join(part for part in loc if isinstance(part, str) and "[" not in part)
    if first["type"] == "missing":
        place = ", ".join(".".join(map(str, one["loc"])) for one in errors if one["type"] == "missing")
    # errors of `__post_init__` name their fields
    if "error" in context and not str(context["error"]).startswith("must"):
        return InputError(": ".join(filter(None, (source, place, str(context["error"])))))
    words = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
    # classes by their names in `flsim`
    public = vars(sys.modules["flsim.api"]) if "flsim.api" in sys.modules else {}
    names = {kind.__name__: f"flsim.{name}" for name, kind in public.items() if isinstance(kind, type)}
    words["class_name"] = names.get(context.get("class_name"), context.get("class_name"))
    sentence = SENTENCES.get(first["type"], "is not allowed: {msg}").format(**words, input=value, msg=first["msg"])
    is_complete = "found" in sentence or first["type"] in ("missing", "unexpected_keyword_argument")
    sentence += "" if is_complete else f", found {value}"
    return InputError(": ".join(filter(None, (source, f"{place} {sentence}"))))


def text_of(value: object) -> str:
    """Return a value for a message: text, numbers and lists as they are written, other values by their type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value) if isinstance(value, str | Real | NoneType) else f"a {type(value).__name__}"


def refuse_other(kind: type | UnionType, expected: str, **values: object) -> None:
    """Raise InputError for the first argument that has another type; `expected` is what to pass instead."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {expected}, found {text_of(value)}")


# Nested mappings, such as the settings of a run, and old names of settings.


# Old names of settings, and their new names.
RENAMED = {"data.world": "data.partition"}


def flat(values: Mapping[str, Any], between: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield names and values of a nested mapping, such as ``training.cohort``, without values that are None."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{between}{inner}", item) for inner, item in flat(value, between))
        elif value is not None:
            yield name, value


def with_present_names(values: Any, names: Mapping[str, str] = RENAMED, section: str = "") -> Any:
    """Return values of TOML or JSON with the new names of settings by their old `names`; InputError if both occur.

    A setting is a key of its section, a key with a dot (the axis of a sweep), or a text in a list.
    """
    if isinstance(values, list | tuple):
        return [names.get(item, item) if isinstance(item, str) else with_present_names(item, names) for item in values]
    if not isinstance(values, Mapping):
        return values
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        new = names.get(key) or names.get(f"{section}.{key}", "").removeprefix(f"{section}.") or key
        if new != key and new in values:
            raise InputError(f"{key} is the old name of {new}, and both are set; remove {key}")
        renamed[new] = with_present_names(value, names, key)
    return renamed


def with_former_names(values: Any) -> Any:
    """Return values with the oldest names of settings, so that digests of older files do not change."""
    return with_present_names(values, {new: old for old, new in RENAMED.items()})
