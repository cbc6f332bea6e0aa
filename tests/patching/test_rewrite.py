"""A rewritten function is the release's own in everything but the exchanged expression."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2d_patch.patching.install import build_rewrite, original_code
from h2d_patch.patching.locate import locate
from h2d_patch.patching.pattern import Pattern, parse_put
from h2d_patch.patching.rewrite import ModuleSource, Refused, Rewrite
from h2d_patch.patching.switch import Site

EXPORTS = {"swap"}


def rewrite(
    find: str = "copy(X)", put: str = "swap(X)", times: tuple[int, ...] = (1,), inside: str | None = None
) -> Rewrite:
    pattern = Pattern.parse(find)
    return Rewrite(pattern, parse_put(put, pattern, EXPORTS), times, inside=inside)


def put_in(
    module: types.ModuleType, name: str, *rewrites: Rewrite, swap: Callable[..., Any] = lambda x: ("new", x)
) -> tuple[Site, Callable[[], None]]:
    located = locate(module, name)
    assert located is not None and module.__file__ is not None
    with open(module.__file__, "rb") as file:
        source = ModuleSource(file.read(), module.__file__)
    definition = source.definition_of(name, original_code(located.function))
    site = Site()
    site.bind("swap", swap)
    undo = build_rewrite(located.function, source, definition, rewrites or (rewrite(),), site)()
    site.on = True
    return site, undo


PRELUDE = "def copy(x):\n    return ('old', x)\n"

SHAPES = {
    "plain": ("f", "def f(x):\n    return copy(x)", lambda m: m.f(1)),
    "keyword-only defaults": ("f", "def f(x, *, y=2, **kw):\n    return copy(x + y)", lambda m: m.f(1)),
    "closure": ("make.<locals>.f", None, None),
    "method": ("C.f", "class C:\n    def f(self, x):\n        return copy(x)", lambda m: m.C().f(1)),
    "super": (
        "D.f",
        "class B:\n    def f(self, x):\n        return x\n"
        "class D(B):\n    def f(self, x):\n        return copy(super().f(x)), __class__.__name__",
        lambda m: m.D().f(1),
    ),
    "mangled": ("C.f", "class C:\n    __n = 5\n    def f(self):\n        return copy(self.__n)", lambda m: m.C().f()),
    "static": ("C.f", "class C:\n    @staticmethod\n    def f(x):\n        return copy(x)", lambda m: m.C.f(1)),
    "class method": ("C.f", "class C:\n    @classmethod\n    def f(cls, x):\n        return copy(x)", lambda m: m.C.f(1)),
    "property": ("C.f", "class C:\n    @property\n    def f(self):\n        return copy(3)", lambda m: m.C().f),
    "generator": ("f", "def f(x):\n    yield copy(x)\n    yield 2", lambda m: list(m.f(1))),
    "async": ("f", "async def f(x):\n    return copy(x)", lambda m: asyncio.run(m.f(1))),
    "comprehension": ("f", "def f(x):\n    return [copy(i) for i in range(x)]", lambda m: m.f(3)),
    "lambda": ("f", "def f(x):\n    return (lambda y: copy(y))(x)", lambda m: m.f(1)),
    "walrus": ("f", "def f(x):\n    return copy(y := x), y", lambda m: m.f(1)),
    "f-string": ("f", "def f(x):\n    return f'{copy(x)!r:>20}'", lambda m: m.f(1)),
    "under if": ("f", "import sys\nif sys:\n    def f(x):\n        return copy(x)\nelse:\n    def f(x):\n        return 0", lambda m: m.f(1)),
    "under try": ("f", "try:\n    def f(x):\n        return copy(x)\nexcept ImportError:\n    f = None", lambda m: m.f(1)),
    "lru_cache": ("f", "import functools\n@functools.lru_cache(maxsize=4)\ndef f(x):\n    return copy(x)", lambda m: m.f(1)),
    "wraps": (
        "f",
        "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def inner(*a):\n        return g(*a)\n    return inner\n"
        "@deco\ndef f(x):\n    return copy(x)",
        lambda m: m.f(1),
    ),
    "decorator without wraps": (
        "f",
        "def deco(g):\n    def inner(*a):\n        return g(*a)\n    return inner\n@deco\ndef f(x):\n    return copy(x)",
        lambda m: m.f(1),
    ),
    "imported names": ("f", "import math as np\ndef f(x):\n    return copy(np.floor(x)), np.ceil(x)", lambda m: m.f(1.5)),
    "try finally": ("f", "def f(x):\n    try:\n        return copy(x)\n    finally:\n        x = 0", lambda m: m.f(1)),
    "nested function": ("f", "def f(x):\n    def g():\n        return copy(x)\n    return g()", lambda m: m.f(1)),
    "future annotations": ("f", "from __future__ import annotations\ndef f(x: Later) -> int:\n    return copy(x)", lambda m: m.f(1)),
}  # fmt: skip


def text_with_copy(source: str) -> str:
    first, _, rest = source.partition("\n")
    return f"{first}\n{PRELUDE}{rest}" if first.startswith("from __future__") else PRELUDE + source


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "closure"])
def test_every_shape_of_function_is_rewritten_switched_and_restored(make_module, shape: str) -> None:  # type: ignore[no-untyped-def]
    name, source, call = SHAPES[shape]
    module = make_module(text_with_copy(source))
    located = locate(module, name)
    assert located is not None
    function, code = located.function, located.function.__code__
    before = call(module)
    clear = located.clear_cache or (lambda: None)
    clear()
    site, undo = put_in(module, name)
    assert locate(module, name).function is function
    fixed = call(module)
    assert repr(fixed) == repr(before).replace("'old'", "'new'")
    assert inspect.signature(function) is not None
    site.on = False
    clear()
    assert call(module) == before
    undo()
    clear()
    assert call(module) == before
    assert function.__code__ is code


def test_a_closure_keeps_its_cells(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        PRELUDE
        + "def make(n):\n    def f(x):\n        return copy(x + n)\n    return f\none, ten = make(1), make(10)\n"
    )
    site = Site()
    site.bind("swap", lambda x: ("new", x))
    source = ModuleSource(Path(module.__file__).read_bytes(), module.__file__)
    definition = source.definition_of("make.<locals>.f", module.ten.__code__)
    undo = build_rewrite(module.ten, source, definition, [rewrite()], site)()
    site.on = True
    assert (module.one(0), module.ten(0)) == (("old", 1), ("new", 10))
    undo()
    assert module.ten(0) == ("old", 10)


def test_a_traceback_points_at_the_release_s_own_file_and_line(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def f(x):\n    y = 1\n    return copy(\n        x\n    ) + (\n        1 / x)\n")

    def lines(call: Callable[[], object]) -> list[tuple[str, int | None]]:
        with pytest.raises(ZeroDivisionError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        return [(frame.filename, frame.lineno) for frame in frames if frame.filename == module.__file__]

    before = lines(lambda: module.f(0))
    site, _ = put_in(module, "f", swap=lambda x: 0)
    assert lines(lambda: module.f(0)) == before
    site.on = False
    assert lines(lambda: module.f(0)) == before
    assert len(before) == 1


def test_statements_are_exchanged_as_a_block(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        """
        def put(d, s): d.append(("old", s))
        def f(rows):
            out = []
            for row in rows:
                put(out, row)
            return out
        """
    )
    loop = rewrite("for A in B:\n    put(C, A)", "swap(C, B)", inside="")
    site, undo = put_in(module, "f", loop, swap=lambda out, rows: out.append(("new", list(rows))))
    assert module.f([1, 2]) == [("new", [1, 2])]
    site.on = False
    assert module.f([1, 2]) == [("old", 1), ("old", 2)]
    undo()


def test_arguments_that_no_wildcard_names_are_passed_on(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        "class W:\n    def plan(self, *a, **k):\n        return 'old', a, k\ndef f(w, *a):\n    return w.plan(1, *a, x=2, **{'y': 3})\n"
    )
    plan = rewrite("W.plan(*ARGS, **KW)", "swap(W.plan, *ARGS, **KW)")
    put_in(module, "f", plan, swap=lambda plan, *a, **k: ("new", *plan(*a, **k)[1:]))
    assert module.f(module.W(), 5) == ("new", (1, 5), {"x": 2, "y": 3})


def test_two_fixes_in_one_function_are_switched_and_undone_apart(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def move(x):\n    return ('old', x)\ndef f(x):\n    return copy(x), move(x)\n")
    code = module.f.__code__
    first, undo_first = put_in(module, "f", rewrite())
    _, undo_second = put_in(module, "f", rewrite("move(X)"))
    assert module.f(1) == (("new", 1), ("new", 1))
    first.on = False
    assert module.f(1) == (("old", 1), ("new", 1))
    undo_first()
    assert module.f(1) == (("old", 1), ("new", 1))
    undo_second()
    assert module.f.__code__ is code


@pytest.mark.parametrize(
    ("body", "made", "says"),
    [
        ("return copy(x), copy(x)", rewrite(), "occurs 2 times"),
        ("return x", rewrite(), "occurs 0 times"),
        ("return copy(g())", rewrite(put="swap(X, X)"), "evaluated 2 times"),
        ("return copy(g())", rewrite("copy(X)", "swap(1)"), "evaluated 0 times"),
        ("return copy(copy(x))", rewrite(times=(2,)), "inside another"),
        ("return copy(x)", rewrite(put="swap(X, other)"), "no name 'other'"),
        ("return copy(x) + 1", rewrite(inside=""), "not a statement of its own"),
        ("if x:\n        return copy(x)", rewrite(inside=""), "not a statement of its own"),
    ],
)
def test_what_cannot_be_rewritten_faithfully_is_refused(make_module, body: str, made: Rewrite, says: str) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + f"def f(x):\n    {body}\n")
    code = module.f.__code__
    with pytest.raises(Refused, match=says):
        put_in(module, "f", made)
    assert module.f.__code__ is code


def test_a_source_that_is_not_what_runs_is_refused(make_module, tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def f(x):\n    return copy(x)\n")
    (tmp_path / "release_module.py").write_text(PRELUDE + "def f(x):\n    return copy(x + 1)\n")
    with pytest.raises(Refused, match="not the source of the running function"):
        put_in(module, "f")


def test_a_pyc_without_columns_is_no_other_source(make_module, tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def f(x):\n    return copy(\n        x)\n")
    source = ModuleSource((tmp_path / "release_module.py").read_bytes(), module.__file__)
    moved = ModuleSource(
        (tmp_path / "release_module.py").read_bytes().replace(b"        x)", b"    x)"), module.__file__
    )
    assert source.definition_of("f", module.f.__code__).name == moved.definition_of("f", module.f.__code__).name


def test_latin_1_and_byte_order_marks_are_read_as_python_reads_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for data in (b"# coding: latin-1\ndef f():\n    return '\xe9'\n", b"\xef\xbb\xbfdef f():\n    return '\xc3\xa9'\n"):
        path = tmp_path / "m.py"
        path.write_bytes(data)
        names: dict[str, Any] = {}
        exec(compile(data, str(path), "exec", dont_inherit=True), names)
        assert ModuleSource(data, str(path)).definition_of("f", names["f"].__code__).name == "f"


def test_the_module_s_own_names_are_left_alone(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def f(x):\n    return copy(x)\n")
    before = set(vars(module))
    _, undo = put_in(module, "f")
    added = set(vars(module)) - before
    assert all(name.startswith("__h2d_patch_") for name in added) and len(added) == 1
    undo()


def test_a_frame_that_still_runs_when_the_fix_is_taken_out_ends_well(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(PRELUDE + "def f(x):\n    yield 0\n    yield copy(x)\n")
    _, undo = put_in(module, "f")
    running = module.f(1)
    next(running)
    undo()
    assert next(running) == ("old", 1)


def counts(site: Site) -> tuple[int, int]:
    return site.arms[True].count, site.arms[False].count


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ("return copy(x)", rewrite()),
        ("y = 0\n    for z in [x]:\n        y = copy(z)\n    return y", rewrite("for A in B:\n    C = copy(A)", "C = swap(B[0])")),
    ],
    ids=["expression", "statements"],
)  # fmt: skip
def test_the_fixed_arm_is_timed_always_and_the_original_where_it_is_asked_for(
    make_module, body: str, made: Rewrite
) -> None:  # type: ignore[no-untyped-def]
    module = make_module("import time\ndef copy(x):\n    return ('old', 1 / x)\n" + f"def f(x):\n    {body}\n")
    site, _ = put_in(module, "f", made, swap=lambda x: ("new", 1 / x))
    module.f(1)
    assert counts(site) == (1, 0) and 0 < site.arms[True].ns < 1e9
    site.on = False
    module.f(1)
    assert counts(site) == (1, 0)
    site.timed = True
    module.f(1)
    assert counts(site) == (1, 1)
    for site.on in (True, False):
        with pytest.raises(ZeroDivisionError):
            module.f(0)
    assert counts(site) == (1, 1)  # of what raises, nothing is kept
    assert module.f(1) == ("old", 1) and counts(site) == (1, 2)


def test_an_arm_that_leaves_the_function_is_not_taken_for_the_next_one_s_time(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        PRELUDE + "def f(rows):\n    for row in rows:\n        if row:\n            return copy(row)\n    return 0\n"
    )
    loop = rewrite("for A in B:\n    if A:\n        return copy(A)", "swap(B)", inside="")
    site, _ = put_in(module, "f", loop)
    site.on, site.timed = False, True
    assert module.f([1]) == ("old", 1) and counts(site) == (0, 0)
    time.sleep(0.05)
    assert module.f([]) == 0 and counts(site) == (0, 1)
    assert site.arms[False].ns < 40e6
