"""Mutations of Python source: each is a small change of one operator, comparison, constant or call.

Messages, annotations, decorators and docstrings are not mutated. A mutation replaces the text of one node, so that all
other text of the file stays as it is.
"""

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
FUNCTIONS = {
    **{"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin"},
    **{"minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor", "any": "all", "all": "any"},
    **{"exp": "expm1", "expm1": "exp", "log": "log1p", "log1p": "log", "sum": "mean", "mean": "sum"},
    **{"cdf": "sf", "sf": "cdf", "ppf": "isf", "isf": "ppf", "lower": "upper", "upper": "lower"},
}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "hypot", "logaddexp", "union1d", "gcd", "isclose", "array_equal"}
WORDS = {"left": "right", "right": "left"}  # sides of a search in a sorted array
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)  # messages, and code without formulas
CHECKS = "strict"  # the argument of zip that makes unequal lengths an error


@dataclass(frozen=True)
class Mutant:
    """One changed file.

    Attributes:
        path: the file's path inside the project.
        line, end: first and last line of the function or method of the change; 0 outside of functions.
        place: number of the changed line.
        before, after: the changed lines, without line breaks and indentation.
        source: text of the changed file.
    """

    path: str
    line: int
    end: int
    place: int
    before: str
    after: str
    source: str

    def covers(self, line: int) -> bool:
        """Return whether a function that begins in this line can contain the change."""
        return not self.line or self.line <= line <= self.end

    def is_like(self, entry: Mapping[str, str]) -> bool:
        """Return whether an entry of the list of equivalent mutants describes this one."""
        same = self.path == entry["file"] and self.before == entry["before"]
        return same and entry.get("after", self.after) == self.after


def mutants_of(path: str, source: str) -> list[list[Mutant]]:
    """Return the mutants of each node of a file that can be mutated."""
    sites = ((owner, node, [*changes(node)]) for owner, node in _nodes(ast.parse(source)))
    return [[_mutant(path, source, owner, node, change) for change in found] for owner, node, found in sites if found]


def changes(node: ast.AST) -> Iterator[ast.expr | ast.AugAssign]:
    """Yield the possible replacements of a node."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS and not any(map(_is_text, (node.left, node.right))):
            yield _with(node, op=OPERATORS[type(op)]())
            yield node.left
            yield node.right
        case ast.AugAssign(op=op) if type(op) in OPERATORS and not _is_text(node.value):
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=[*ops]):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BoolOp():
            yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 if value else 1.0)
            yield ast.Constant(value / 2 if value else -1.0)
        case ast.Constant(value=str(value)) if value in WORDS:
            yield ast.Constant(WORDS[value])
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[ast.expr]:
    """Yield calls with two neighbouring arguments swapped, of another function, or without a bound."""
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for index in range(len(node.args) - 1) if called not in COMMUTATIVE else ():
        if ast.dump(node.args[index]) != ast.dump(node.args[index + 1]):
            swapped = [*node.args]
            swapped[index : index + 2] = swapped[index + 1], swapped[index]
            yield _with(node, args=swapped)
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in FUNCTIONS:
            field = "id" if isinstance(node.func, ast.Name) else "attr"
            yield _with(node, func=_with(node.func, **{field: FUNCTIONS[name]}))
            if name in ("min", "max") and len(node.args) == 2:
                yield from node.args
        case ast.Name(id="abs"):
            yield node.args[0]
        case ast.Attribute(attr="clip"):
            yield node.func.value


def _with(node: ast.AST, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed  # type: ignore[return-value]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yield the nodes that may be mutated, each with the statement of the file or class that contains it."""
    for statement in tree.body:
        for owner in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            yield from ((owner, node) for node in _inside(owner))


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, SKIPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, ast.keyword) and node.arg == CHECKS:
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _inside(child)


def _mutant(path: str, source: str, owner: ast.stmt, node: ast.AST, change: ast.expr | ast.AugAssign) -> Mutant:
    lines = source.encode().splitlines(keepends=True)  # positions count bytes
    first, last = node.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
    text = ast.unparse(change)
    if isinstance(change, ast.BinOp | ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Lambda | ast.IfExp):
        text = f"({text})"
    head, tail = lines[first][: node.col_offset], lines[last - 1][node.end_col_offset :]  # type: ignore[attr-defined]
    changed = head + text.encode() + tail
    before, after = (" ".join(text.decode().split()) for text in (b"".join(lines[first:last]), changed))
    whole = b"".join([*lines[:first], changed, *lines[last:]]).decode()
    start = end = 0
    if isinstance(owner, ast.FunctionDef):
        start = min([owner.lineno, *(decorator.lineno for decorator in owner.decorator_list)])
        end = owner.end_lineno or start
    return Mutant(path, start, end, node.lineno, before, after, whole)  # type: ignore[attr-defined]
