"""A release's own function with single expressions exchanged, compiled again without running anything.

Both arms stand in the new code, `PUT if <site>.on else FIND`, so that turning a fix off runs exactly the original
expression; the site is told when an arm begins and ends. The site (see `switch`) is a global of the module under a name
of our own, which stays there after an undo: frames that still run the new code need it. (A constant of the code would
leave no name, but torch.compile refuses functions with constants that it does not know.)
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .pattern import FUNCTION, Definition, Match, Pattern, definitions, parse_inside, simple, stands_in, wildcard
from .switch import Site


class Refused(Exception):
    """This source or function is not one that we know how to treat; the text is the verdict's reason."""


@dataclass(frozen=True)
class Rewrite:
    """What to exchange in one function: every match of `find` becomes `put`.

    `times` are the numbers of matches that known releases have; `upstream` are the patterns of upstream's own fix;
    `inside` is the header of the statement that each match must stand in directly (None: anywhere).
    """

    find: Pattern
    put: Pattern
    times: tuple[int, ...] = (1,)
    upstream: tuple[Pattern, ...] = ()
    inside: str | None = None
    given: tuple[str, ...] = ()

    def matches(self, function: ast.AST) -> list[Match]:
        """All matches in `function`. Raises Refused unless they are as many, and stand where, the manifest says."""
        found = self.find.find(function)
        if len(found) not in self.times:
            expected = " or ".join(str(number) for number in self.times)
            lines = f" (lines {', '.join(str(match.line) for match in found)})" if found else ""
            raise Refused(f"the copying expression occurs {len(found)} times in it{lines}, expected {expected}")
        inner = {id(node) for match in found for root in match.nodes for node in ast.walk(root) if node is not root}
        if any(id(root) in inner for match in found for root in match.nodes):
            raise Refused("the copying expression occurs inside another of its kind")
        names = {getattr(node, "id", getattr(node, "arg", None)) for node in ast.walk(function)}
        if missing := sorted(self.put.names() - self.put.called() - names):
            raise Refused(f"it has no name {missing[0]!r}, which the new expression needs")
        for match in found:
            if self.inside is not None and not stands_in(match, parse_inside(self.inside)):
                place = f"a statement directly under {self.inside!r}" if self.inside else "a statement of its own"
                raise Refused(f"the copying expression in line {match.line} is not {place}, as it is in known releases")
            self._check_evaluation(match)
        return found

    def needs(self) -> set[str]:
        """The attributes of `self` that the new expression asks for, and the old does not."""
        return of_self(self.put.roots) - of_self(self.find.roots)

    def _check_evaluation(self, match: Match) -> None:
        counts = self.put.wildcards()
        for name, before in self.find.wildcards().items():
            if not simple(match.bound[name]) and counts.get(name, 0) != before:
                raise Refused(
                    f"{name} in line {match.line} would be evaluated {counts.get(name, 0)} times instead of {before}"
                )


def of_self(roots: Iterable[ast.AST]) -> set[str]:
    """The attributes of `self` that are named in it."""
    return {
        node.attr
        for root in roots
        for node in ast.walk(root)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


class ModuleSource:
    """One module's source, parsed once for all targets in it."""

    def __init__(self, data: bytes, filename: str) -> None:
        self.filename = filename
        self.tree = ast.parse(data, filename)
        self._named: dict[str, list[Definition]] = {}
        self._chain: dict[int, list[ast.AST]] = {}
        for name, node, chain in definitions(self.tree):
            self._named.setdefault(name, []).append(node)
            self._chain[id(node)] = chain

    def named(self, qualname: str) -> list[Definition]:
        return self._named.get(qualname, [])

    def scope(self, node: Definition) -> ast.AST:
        """The class, with all of its methods, that a function of this module is defined in; else the function."""
        return next((part for part in reversed(self._chain[id(node)]) if isinstance(part, ast.ClassDef)), node)

    def definition_of(self, qualname: str, code: types.CodeType) -> Definition:
        """The definition of `qualname` whose unchanged compilation gives `code`.

        Raises Refused when there is none: the file is not what runs.
        """
        for node in self.named(qualname):
            if first_line(node) == code.co_firstlineno and any(
                same_code(code, compiled) for compiled in self._compile(node, self._chain[id(node)], code)
            ):
                return node
        raise Refused(f"{self.filename} is not the source of the running function")

    def build(
        self,
        node: Definition,
        code: types.CodeType,
        exchanges: Sequence[tuple[Rewrite, Site]],
    ) -> types.CodeType:
        """`code` compiled again from `node` with every rewrite's matches exchanged, calling through its site.

        Raises Refused when a rewrite does not match, when matches overlap, or when the new code would need other
        variables from outside than the old.
        """
        arms: dict[int, tuple[ast.stmt | ast.expr, int]] = {}  # first node of a match → what replaces how many nodes
        taken: set[int] = set()
        for rewrite, site in exchanges:
            for match in rewrite.matches(node):
                covered = {id(inner) for root in match.nodes for inner in ast.walk(root) if inner._fields}
                if covered & taken:
                    raise Refused(f"two exchanged expressions overlap in line {match.line}")
                taken |= covered
                arms[id(match.nodes[0])] = (_both_arms(match, rewrite.put, site.name), len(match.nodes))
        with _exchanged(node, arms):
            compiled = self._compile(node, self._chain[id(node)], code)
        if len(compiled) != 1:
            raise Refused(f"compiling it again gave {len(compiled)} functions")
        new = compiled[0]
        for what in ("co_freevars", "co_cellvars", "co_varnames", "co_flags"):
            if getattr(new, what) != getattr(code, what):
                raise Refused(f"the new code differs in {what}")
        return new

    def _compile(self, node: ast.stmt, chain: Sequence[ast.AST], code: types.CodeType) -> list[types.CodeType]:
        """Every code object of `code`'s name and first line in the smallest module that holds `node`."""
        for number, part in enumerate(chain):
            if isinstance(part, FUNCTION):  # a function in a function: the outermost one whole, for its cells
                node, chain = part, chain[:number]
                break
        for part in reversed(chain):
            assert isinstance(part, ast.ClassDef)
            extra: Any = {"type_params": []} if "type_params" in ast.ClassDef._fields else {}
            node = ast.copy_location(ast.ClassDef(part.name, [], [], [node], [], **extra), part)
        # Imports must stay: from 3.11 on, `np.f()` compiles differently where np is imported in the module.
        module = ast.Module([*_imports(self.tree), node], [])
        top = compile(module, code.co_filename, "exec", dont_inherit=True)
        return [
            inner
            for inner in _functions(top)
            if inner.co_name == code.co_name and inner.co_firstlineno == code.co_firstlineno
        ]


def first_line(node: Definition) -> int:
    """Where a function's code says it begins: at its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do the same and say the same of lines; columns, which a .pyc may lack, do not count."""
    fields = (
        "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags",
        "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_firstlineno", "co_exceptiontable",
        "co_qualname",
    )  # fmt: skip
    return (
        all(getattr(one, name, None) == getattr(other, name, None) for name in fields)
        and list(one.co_lines()) == list(other.co_lines())
        and len(one.co_consts) == len(other.co_consts)
        and all(_same_constant(a, b) for a, b in zip(one.co_consts, other.co_consts, strict=True))
    )


def _same_constant(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, types.CodeType):
        assert isinstance(other, types.CodeType)
        return same_code(one, other)
    if isinstance(one, tuple):
        assert isinstance(other, tuple)
        return len(one) == len(other) and all(_same_constant(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, frozenset):
        assert isinstance(other, frozenset)
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # tells 0.0 from -0.0 and finds nan equal to itself


@contextmanager
def _exchanged(function: ast.AST, arms: Mapping[int, tuple[ast.stmt | ast.expr, int]]) -> Iterator[None]:
    """`function` with `arms` in place of the nodes they are keyed by; as it was again on leaving."""
    before: list[tuple[ast.AST, str, object]] = []
    for parent in list(ast.walk(function)):
        for name, value in ast.iter_fields(parent):
            if any(id(child) in arms for child in (value if isinstance(value, list) else [value])):
                before.append((parent, name, value))
    try:
        for parent, name, value in before:
            setattr(parent, name, _replaced(value, arms))
        yield
    finally:
        for parent, name, value in before:
            setattr(parent, name, value)


def _replaced(value: object, arms: Mapping[int, tuple[ast.stmt | ast.expr, int]]) -> object:
    if not isinstance(value, list):
        return arms[id(value)][0]
    new: list[object] = []
    position = 0
    while position < len(value):
        arm, covered = arms.get(id(value[position]), (value[position], 1))
        new.append(arm)
        position += covered
    return new


def _both_arms(match: Match, put: Pattern, site: str) -> Any:
    fill = _Fill(match, site)
    first = match.nodes[0]
    if put.expression is not None:
        assert isinstance(first, ast.expr)
        new = fill.visit(copy.deepcopy(put.expression))
        fixed, original = fill.timed("now", "ended_on", new), fill.timed("if_timed", "ended_off", first)
        return _at(ast.IfExp(fill.switch(), fixed, original), first)
    statements = [fill.visit(copy.deepcopy(statement)) for statement in put.statements]
    arms = (
        [fill.tell("begin"), *arm, fill.tell(end)] for arm, end in ((statements, "end_on"), (match.nodes, "end_off"))
    )
    return _at(ast.If(fill.switch(), *arms), first)


class _Fill(ast.NodeTransformer):
    """Fills the wildcards of a copy of `put`, and reaches the copy functions through the site."""

    def __init__(self, match: Match, site: str) -> None:
        self._match = match
        self._site = site

    def switch(self) -> Any:
        return self._site_attribute("on")

    def timed(self, begins: str, ended: str, arm: ast.expr) -> Any:
        """`arm`, its value passed through the site's `ended`, with what its `begins` said before."""
        return self._site_call(ended, self._site_call(begins), arm)

    def tell(self, what: str) -> Any:
        return _at(ast.Expr(self._site_call(what)), self._match.nodes[0])

    def _site_call(self, name: str, *arguments: ast.expr) -> Any:
        return _at(ast.Call(self._site_attribute(name), list(arguments), []), self._match.nodes[0])

    def _site_attribute(self, name: str) -> Any:
        place = self._match.nodes[0]
        return _at(ast.Attribute(_at(ast.Name(self._site, ast.Load()), place), name, ast.Load()), place)

    def visit(self, node: ast.AST) -> Any:
        if name := wildcard(node):
            return _in_context(copy.deepcopy(self._match.bound[name]), node.ctx)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            node.func = self._site_attribute(node.func.id)
            node.args = [part for argument in node.args for part in self._argument(argument)]
            node.keywords = [part for keyword in node.keywords for part in self._keyword(keyword)]
        else:
            self.generic_visit(node)
        return _at(node, self._match.nodes[0]) if "lineno" in node._attributes else node

    def _argument(self, argument: ast.expr) -> list[Any]:
        rest = wildcard(argument.value) if isinstance(argument, ast.Starred) else None
        return self._rest(f"*{rest}") if rest else [self.visit(argument)]

    def _keyword(self, keyword: ast.keyword) -> list[Any]:
        rest = wildcard(keyword.value) if keyword.arg is None else None
        return self._rest(f"**{rest}") if rest else [self.visit(keyword)]

    def _rest(self, name: str) -> Any:
        return copy.deepcopy(self._match.bound[name])


def _in_context(node: Any, context: ast.expr_context) -> Any:
    """`node` read or assigned to, as `context` says: `put` may read what `find` assigns, a loop's target for one."""
    if hasattr(node, "ctx"):
        node.ctx = context
    for part in getattr(node, "elts", [node.value] if isinstance(node, ast.Starred) else []):
        _in_context(part, context)
    return node


def _at(node: Any, place: Any) -> Any:
    """Gives `node` a position on one line: from 3.10 on, a call reports the *end* line of its attribute."""
    node.lineno = node.end_lineno = place.lineno
    node.col_offset, node.end_col_offset = place.col_offset, place.col_offset + 1
    return node


def _imports(node: ast.AST) -> list[ast.stmt]:
    """Every import statement of a module, out of the `if`s and `try`s that it stands in."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            found.append(child)
        elif not isinstance(child, (*FUNCTION, ast.ClassDef, ast.expr)):
            found += _imports(child)
    return found


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & 1:  # CO_OPTIMIZED: a function, not a class body
                yield constant
            yield from _functions(constant)
