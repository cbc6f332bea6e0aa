"""What patterns match, and what is no pattern."""

from __future__ import annotations

import ast

import pytest

from h2d_patch.patching.pattern import Pattern, PatternError, normal_form, parse_inside, parse_put, stands_in

EXPORTS = {"copy_h2d", "to_device"}


def found(pattern: str, body: str) -> list[str]:
    function = ast.parse("def f():\n" + "\n".join("    " + line for line in body.splitlines())).body[0]
    return [ast.unparse(match.nodes[0]) for match in Pattern.parse(pattern).find(function)]


@pytest.mark.parametrize(
    ("pattern", "body", "times"),
    [
        ("A.to(D, non_blocking=True)", "x = y.to(d, non_blocking=True)", 1),
        ("A.to(D, non_blocking=True)", "x = y.to(d, non_blocking=False)", 0),
        ("A.to(D, non_blocking=True)", "x = y.to(d, non_blocking=1)", 0),
        ("A.to(D, non_blocking=True)", "x = y.to(d, e, non_blocking=True)", 0),
        ("A.to(D, non_blocking=True)", "x = y.to(*d, non_blocking=True)", 0),
        ("A.f(x=X, y=Y)", "b.f(y=1, x=2)", 1),
        ("A.copy_(A)", "x.copy_(x)", 1),
        ("A.copy_(A)", "x.copy_(y)", 0),
        ("A[:, :N].copy_(B[:, :N])", "g[:, :n].copy_(c[:, :n])", 1),
        ("A[:, :N].copy_(B[:, :N])", "g[:, :n].copy_(c[:, :m])", 0),
        ("A[R, :N].copy_(B[R, :N])", "g[:, :n].copy_(c[:, :n])", 0),
        ("A[R, :N].copy_(B[R, :N])", "for row in range(3):\n    g[row, :n].copy_(c[row, :n])", 1),
        ("W.plan(*ARGS, **KW)", "w.plan(1, *more, x=2, **rest)", 1),
        ("W.plan(X, *ARGS)", "w.plan()", 0),
        ("W.plan(X, *ARGS)", "w.plan(1)", 1),
        ("f(X)", "a = [f(i) for i in range(3) if f(i)]", 2),
        ("f(X)", "g = lambda: f(1)", 1),
        ("f(X)", "async def g():\n    return await f(1)", 1),
        ("f(X)", "def g(a=f(1)):\n    pass", 0),
        ("f(X)", "try:\n    f(1)\nexcept ValueError:\n    f(2)\nelse:\n    f(3)\nfinally:\n    f(4)", 4),
        ("f(X)", "match x:\n    case 1 if f(1):\n        f(2)", 2),
        ("f(X)", "with f(1) as g:\n    pass", 1),
        ("A[I, :N]", "a[i, :n] = a[j, :n]\ndel a[k, :n]", 1),
        ("for A in B:\n    copy(A)", "for x in y:\n    copy(x)", 1),
        ("for A in B:\n    copy(A)", "for x in y:\n    copy(z)", 0),
        ("A = f(B)\nC = g(A)", "x = 1\ny = f(2)\nz = g(y)\n", 1),
        ("A = f(B)\nC = g(A)", "y = f(2)\nx = 1\nz = g(y)\n", 0),
    ],
)
def test_a_pattern_matches_as_often_as_its_source_occurs(pattern: str, body: str, times: int) -> None:
    assert len(found(pattern, body)) == times


@pytest.mark.parametrize(
    "text", ["", "  # only a comment", "f(", "X", "def", "f(X)" + "+1" * 3000, "X" + ".a" * 3000, "f(\0)"]
)
def test_what_is_not_a_pattern_is_said_to_be_none(text: str) -> None:
    with pytest.raises(PatternError, match="expected|matches anything"):
        Pattern.parse(text)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        ("os.system(SRC)", "calls 'os.system'"),
        ("print(SRC)", "calls 'print'"),
        ("copy_h2d(SRC.clone(), D)", "calls 'SRC.clone'"),
        ("copy_h2d(OTHER, D)", "'OTHER' is not in 'find'"),
        ("(lambda: copy_h2d(D, SRC))()", "calls 'lambda"),
        ("[copy_h2d(D, SRC) for x in D]", "ListComp"),
        ("(y := copy_h2d(D, SRC))", "NamedExpr"),
        ("x = copy_h2d(D, SRC)", "expected an expression"),
        ("copy_h2d(", "not Python"),
    ],
)
def test_a_put_calls_copy_functions_and_nothing_else(put: str, says: str) -> None:
    with pytest.raises(PatternError, match=says):
        parse_put(put, Pattern.parse("D.copy_(SRC)"), EXPORTS)


@pytest.mark.parametrize(
    ("inside", "body", "stands"),
    [
        ("if self.on", "if self.on:\n    f(1)", True),
        ("if self.on", "if self.on:\n    x = f(1)", True),
        ("if self.on", "if self.on:\n    g(f(1))", False),
        ("if self.on", "if self.on and more:\n    f(1)", False),
        ("if self.on", "if self.on:\n    if more:\n        f(1)", False),
        ("if self.on", "if self.on:\n    pass\nelse:\n    f(1)", False),
        ("if self.on", "if other:\n    pass\nelif self.on:\n    f(1)", True),
        ("if self.on", "f(1)", False),
        ("", "f(1)", True),
        ("", "return f(1)", True),
        ("", "if self.on:\n    f(1)", False),
        ("for A in B", "for x in y:\n    f(x)", True),
        ("with A", "with lock:\n    f(1)", True),
        ("with A", "with lock as held:\n    f(1)", False),
    ],
)
def test_where_a_match_stands_is_compared_with_the_innermost_statement(inside: str, body: str, stands: bool) -> None:
    function = ast.parse("def f(self):\n" + "\n".join("    " + line for line in body.splitlines())).body[0]
    (match,) = Pattern.parse("f(X)").find(function)
    assert stands_in(match, parse_inside(inside)) is stands


def test_comments_formatting_annotations_and_docstrings_do_not_change_the_normal_form() -> None:
    plain = "def f(a, b=1):\n    return a + b"
    dressed = 'def f(\n    a: int,\n    b: int = 1,\n) -> int:\n    """Adds."""\n    # really\n    return (a + b)'
    assert normal_form(ast.parse(plain).body) == normal_form(ast.parse(dressed).body)


def test_a_changed_constant_changes_the_normal_form() -> None:
    assert normal_form(ast.parse("x = 1").body) != normal_form(ast.parse("x = True").body)
