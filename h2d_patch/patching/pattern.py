"""Patterns over Python source: what is looked for in a function, and what takes its place.

A pattern is Python source. A name in capitals stands for any expression, the same one wherever it recurs; `*ARGS` and
`**KW` at the end of a call stand for whatever arguments remain. A pattern of one expression is looked for at every
place an expression can stand; one of statements is looked for as consecutive statements of one block.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_WILDCARD = re.compile(r"[A-Z][A-Z0-9_]*\Z")
# Not part of what source means, or (ctx) implied by where it stands.
_INCIDENTAL = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})
_BLOCKS = ("body", "orelse", "finalbody")
# What a `put` may be made of: no statement or expression that binds names of its own or leaves the function.
_PUT_NODES = (
    ast.Expr, ast.Assign, ast.For, ast.If, ast.Pass,
    ast.Call, ast.keyword, ast.Starred, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant,
    ast.Tuple, ast.List, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip

Bound = ast.expr | list[ast.expr] | list[ast.keyword]
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class PatternError(ValueError):
    """Text that is not a usable pattern; says what was found and what was expected."""


@dataclass
class Match:
    """One place where a pattern matches: the nodes to exchange and what each wildcard stands for there."""

    nodes: list[ast.stmt] | list[ast.expr]
    bound: dict[str, Bound]
    inside: ast.stmt | None  # the innermost compound statement around it, None directly in the function's body
    branch: str  # which block of that statement
    alone: bool  # a statement of its own, or all of the right side of an assignment or return

    @property
    def line(self) -> int:
        return self.nodes[0].lineno


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern. `text` is what the manifest says; exactly one of `expression` and `statements` is set."""

    text: str
    expression: ast.expr | None = None
    statements: tuple[ast.stmt, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises PatternError when `text` is not Python, or is empty."""
        source = textwrap.dedent(text).strip()
        try:
            body = ast.parse(source).body
            _check_depth(body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise PatternError(f"{_reason(error)}; expected Python source of an expression or of statements") from None
        if not body:
            raise PatternError("nothing in it; expected Python source of an expression or of statements")
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            if wildcard(body[0].value):
                raise PatternError(f"only the wildcard {source!r}, which matches anything")
            return cls(source, body[0].value)
        return cls(source, None, tuple(body))

    @property
    def roots(self) -> Sequence[ast.AST]:
        return [self.expression] if self.expression is not None else self.statements

    def wildcards(self) -> dict[str, int]:
        """Each wildcard (starred ones with their stars) and how often it occurs."""
        counts: dict[str, int] = {}
        for root in self.roots:
            for name in _wildcards(root):
                counts[name] = counts.get(name, 0) + 1
        return counts

    def names(self) -> set[str]:
        """Every name in it that is no wildcard."""
        return {
            node.id
            for root in self.roots
            for node in ast.walk(root)
            if isinstance(node, ast.Name) and not _WILDCARD.match(node.id)
        }

    def called(self) -> set[str]:
        """The names in it that are called as functions."""
        calls = (node.func for root in self.roots for node in ast.walk(root) if isinstance(node, ast.Call))
        return {function.id for function in calls if isinstance(function, ast.Name)}

    def find(self, function: ast.AST) -> list[Match]:
        """Every match in the body of `function`, in order; decorators, defaults and annotations are not looked at."""
        return [
            match
            for statement, siblings, inside, branch in _statements(function, None)
            for match in self._at(statement, siblings, inside, branch)
        ]

    def _at(
        self, statement: ast.stmt, siblings: list[ast.stmt], inside: ast.stmt | None, branch: str
    ) -> Iterator[Match]:
        if self.expression is None:
            start = siblings.index(statement)
            window = siblings[start : start + len(self.statements)]
            bound: dict[str, Bound] = {}
            if len(window) == len(self.statements) and _match(list(self.statements), window, bound):
                yield Match(window, bound, inside, branch, alone=True)
            return
        value = getattr(statement, "value", None)
        for node in _expressions(statement):
            bound = {}
            if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                continue  # assigned to, not evaluated
            if _match(self.expression, node, bound):
                yield Match([node], bound, inside, branch, alone=node is value)


def parse_put(text: str, find: Pattern, exports: Collection[str]) -> Pattern:
    """The pattern that takes the place of `find`: of the same form, calling only `exports`, wildcards those of `find`.

    Raises PatternError.
    """
    put = Pattern.parse(text)
    if put.expression is not None and find.expression is None:
        put = Pattern(put.text, None, (ast.copy_location(ast.Expr(put.expression), put.expression),))
    if (put.expression is None) != (find.expression is None):
        raise PatternError("expected an expression where 'find' is one, statements where it has statements")
    for root in put.roots:
        for node in ast.walk(root):
            if not isinstance(node, _PUT_NODES):
                raise PatternError(f"{type(node).__name__} in {put.text!r}; expected calls of copy functions only")
            if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in exports):
                raise PatternError(
                    f"calls {ast.unparse(node.func)!r}; expected only functions of h2d_patch.copies: "
                    f"{', '.join(sorted(exports))}"
                )
    if unknown := sorted(set(put.wildcards()) - set(find.wildcards())):
        raise PatternError(f"wildcard {unknown[0]!r} is not in 'find'; expected one of {sorted(find.wildcards())}")
    return put


def parse_inside(text: str) -> ast.stmt | None:
    """The header of a compound statement, as in `if self.uses_mrope`; empty text means the function's own body.

    Raises PatternError.
    """
    source = text.strip().rstrip(":")
    if not source:
        return None
    try:
        body = ast.parse(f"{source}:\n    pass").body if "\n" not in source else []
        _check_depth(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PatternError(f"{_reason(error)}; expected a header such as 'if self.uses_mrope'") from None
    if len(body) != 1 or not isinstance(body[0], (ast.If, ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith)):
        raise PatternError(f"{source!r}; expected the header of an if, for, while or with statement")
    return body[0]


def stands_in(match: Match, header: ast.stmt | None) -> bool:
    """Whether `match` stands by itself, directly in the block that `header` opens."""
    if not match.alone:
        return False
    if header is None or match.inside is None:
        return header is match.inside
    skipped = {*_BLOCKS, "handlers"}
    return match.branch == "body" and _match(header, match.inside, {}, skipped)


def simple(bound: Bound) -> bool:
    """Whether evaluating it once more, or not at all, changes nothing: names, attributes, constants, subscripts."""
    nodes = bound if isinstance(bound, list) else [bound]
    allowed = (
        ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Starred, ast.keyword,
        ast.UnaryOp, ast.USub, ast.BinOp, ast.operator, ast.expr_context,
    )  # fmt: skip
    return all(isinstance(inner, allowed) for node in nodes for inner in ast.walk(node))


def definitions(tree: ast.AST) -> Iterator[tuple[str, Definition, list[ast.AST]]]:
    """(qualified name, definition, enclosing classes and functions) of every function in `tree`.

    Definitions under `if`, `try` or `with` count, so one name may come more than once.
    """

    def walk(node: ast.AST, scope: str, chain: list[ast.AST]) -> Iterator[tuple[str, Definition, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTION):
                yield scope + child.name, child, chain
                yield from walk(child, f"{scope}{child.name}.<locals>.", [*chain, child])
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{scope}{child.name}.", [*chain, child])
            elif not isinstance(child, ast.expr):
                yield from walk(child, scope, chain)

    yield from walk(tree, "", [])


def normal_form(node: object) -> object:
    """`node` without positions, annotations and docstring, in a form that is the same under every Python version."""
    if isinstance(node, ast.AST):
        parts = []
        for name, value in ast.iter_fields(node):
            if name in _INCIDENTAL or value is None or value == []:
                continue
            if name in ("annotation", "returns") and isinstance(node, (ast.arg, *FUNCTION)):
                continue
            if name == "body" and isinstance(node, FUNCTION) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]
            parts.append((name, normal_form(value)))
        return (type(node).__name__, *parts)
    if isinstance(node, list):
        return [normal_form(item) for item in node]
    return (type(node).__name__, repr(node))


def wildcard(node: object) -> str | None:
    return node.id if isinstance(node, ast.Name) and _WILDCARD.match(node.id) else None


def _reason(error: BaseException) -> str:
    return f"not Python ({getattr(error, 'msg', None) or error or type(error).__name__})"


def _check_depth(body: list[ast.stmt], most: int = 100) -> None:
    """Raises RecursionError for source nested so deeply that walking it would, somewhere and some time."""
    level: list[ast.AST] = list(body)
    for _ in range(most):
        if not level:
            return
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    raise RecursionError("nested too deeply")


def _wildcards(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _wildcards(node.func)
        for argument in node.args:
            rest = wildcard(argument.value) if isinstance(argument, ast.Starred) else None
            yield from [f"*{rest}"] if rest else _wildcards(argument)
        for keyword in node.keywords:
            rest = wildcard(keyword.value) if keyword.arg is None else None
            yield from [f"**{rest}"] if rest else _wildcards(keyword.value)
    elif name := wildcard(node):
        yield name
    else:
        for child in ast.iter_child_nodes(node):
            yield from _wildcards(child)


def _statements(
    node: ast.AST, inside: ast.stmt | None
) -> Iterator[tuple[ast.stmt, list[ast.stmt], ast.stmt | None, str]]:
    """(statement, the block it stands in, the compound statement around that, which block) below `node`, in order."""
    for branch in _BLOCKS:
        block = getattr(node, branch, [])
        if not isinstance(block, list):
            continue  # the body of a lambda or of a conditional expression is an expression
        for statement in block:
            yield statement, block, inside, branch
            yield from _statements(statement, statement)
    for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        yield from _statements(part, inside)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Every expression of `statement` itself, not of the statements inside it."""

    def walk(node: ast.AST) -> Iterator[ast.expr]:
        for name, value in ast.iter_fields(node):
            if isinstance(statement, FUNCTION) and node is statement and name in ("decorator_list", "args", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    yield child
                    yield from walk(child)
                elif isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                    yield from walk(child)

    yield from walk(statement)


def _match(pattern: object, node: object, bound: dict[str, Bound], skipped: Collection[str] = frozenset()) -> bool:
    """Whether `pattern` matches `node`; fills `bound`. Fields named in `skipped` are not looked at in the outermost."""
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_match(part, inner, bound) for part, inner in zip(pattern, node, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if name := wildcard(pattern):
        return isinstance(node, ast.expr) and _stands_alone(node) and _bind(name, node, bound)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call):
        assert isinstance(node, ast.Call)
        return _match(pattern.func, node.func, bound) and _match_arguments(pattern, node, bound)
    return all(
        _match(getattr(pattern, name, None), getattr(node, name, None), bound)
        for name in pattern._fields
        if name not in _INCIDENTAL and name not in skipped
    )


def _match_arguments(pattern: ast.Call, node: ast.Call, bound: dict[str, Bound]) -> bool:
    """Positional arguments in order, keywords by name in any order, `*ARGS` and `**KW` for what remains."""
    positional = list(pattern.args)
    rest = wildcard(positional[-1].value) if positional and isinstance(positional[-1], ast.Starred) else None
    if rest:
        positional.pop()
    taken = node.args[: len(positional)]
    if not _match(positional, taken, bound):
        return False
    if rest:
        if not _bind(f"*{rest}", node.args[len(positional) :], bound):
            return False
    elif len(node.args) != len(positional):
        return False
    remaining = list(node.keywords)
    rest = None
    for keyword in pattern.keywords:
        if keyword.arg is None and (rest := wildcard(keyword.value)):
            continue
        for candidate in remaining:
            if candidate.arg == keyword.arg and _match(keyword.value, candidate.value, bound):
                remaining.remove(candidate)
                break
        else:
            return False
    return _bind(f"**{rest}", remaining, bound) if rest else not remaining


def _bind(name: str, value: Bound, bound: dict[str, Bound]) -> bool:
    if name in bound:
        return normal_form(bound[name]) == normal_form(value)
    bound[name] = value
    return True


def _stands_alone(node: ast.expr) -> bool:
    """Whether `node` could stand anywhere: slices and starred arguments are expression nodes too, `f(:n)` is none."""
    return not isinstance(node, (ast.Slice, ast.Starred)) and not (
        isinstance(node, ast.Tuple) and any(isinstance(element, ast.Slice) for element in node.elts)
    )
