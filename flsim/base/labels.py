"""The labels that a user's own code declares, read from its source without executing it."""

import ast
from pathlib import Path

from flsim.base.extensions import as_written, options_as_text, parts


def declared_label(name: str) -> str:
    """Return the label of the object at ``path/to/file.py:NAME``, with its options; NAME where none can be read.

    Such a label is a text in the file: ``label = "EF-Sign"`` in the class NAME; or the first argument, or the argument
    ``label``, of the call that makes NAME or that the function NAME returns, as in ``NAME = ServerOptimizer("Nesterov",
    init, apply)``.
    """
    path, attribute = parts(as_written(name))
    try:
        source = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return attribute + options_as_text(name)
    labels = [label for node in source.body if (label := _label_in(node, attribute))]
    return (labels[-1] if labels else attribute) + options_as_text(name)


def _label_in(node: ast.stmt, attribute: str) -> str | None:
    match node:
        case ast.ClassDef(name=name) if name == attribute:
            return next((text for inside in node.body if (text := _assigned(inside, "label"))), None)
        case ast.FunctionDef(name=name) if name == attribute:
            returned = [inside.value for inside in ast.walk(node) if isinstance(inside, ast.Return)]
            return next((text for value in returned if (text := _label_of_call(value))), None)
        case ast.Assign(targets=[ast.Name(id=name)]) if name == attribute:
            return _label_of_call(node.value)
    return None


def _assigned(node: ast.stmt, attribute: str) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == attribute:
            return _text(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if name == attribute:
            return _text(value)
    return None


def _label_of_call(node: ast.expr | None) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    named = [keyword.value for keyword in node.keywords if keyword.arg == "label"]
    return next(map(_text, (*named, *node.args)), None)


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
        return node.value.strip() or None
    return None
