"""Real functions with something changed in them, as vendors do: what kept its meaning applies, all else is refused.

Each alteration is made in the syntax tree, at the place where the fix would go in, of one release's own function for
each target of the manifest.
"""

from __future__ import annotations

import ast
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from h2d_patch.manifest import load
from h2d_patch.patching.pattern import Match, _statements, parse_inside
from h2d_patch.patching.recognise import Recognition, Target, recognise_statically
from h2d_patch.patching.rewrite import ModuleSource
from h2d_patch.releases import named, shipped

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch
from releases import applying, fewest

pytestmark = pytest.mark.releases

# How the manifest describes a target: "whole" functions are replaced; of an expression it says in which statement it
# stands ("placed"), or not ("free"); a "loop" is exchanged as statements.
FORMS = ("whole", "placed", "free", "loop")
FLASHINFER = {"0.22.1": "0.6.11.post2"}  # a release and the version that it asks for


@dataclass(frozen=True)
class Place:
    """A target of the manifest and a release that it applies to."""

    target: Target
    release: str

    @property
    def form(self) -> str:
        if self.target.replace:
            return "whole"
        rewrite = self.target.rewrites[0]
        if rewrite.find.expression is None:
            return "loop"
        return "free" if rewrite.inside is None else "placed"

    @property
    def source(self) -> ModuleSource:
        return source_of(self.release, self.target.module)


@functools.cache
def source_of(release: str, module: str) -> ModuleSource:
    folder = fetch(release) if module.startswith("vllm.") else fetch(FLASHINFER[release], "flashinfer-python")
    path = folder / f"{module.replace('.', '/')}.py"
    return ModuleSource(path.read_bytes(), str(path))


@pytest.fixture(scope="module", autouse=True)
def sources_go_again() -> Iterator[None]:
    """Millions of objects: each collection of garbage would take as long as a test that comes later may."""
    yield
    source_of.cache_clear()


@functools.cache
def places() -> dict[str, Place]:
    """Every target, by its name in the table, with a release that others are looked at in too."""
    targets, sources = dict(named(load().targets())), applying(shipped())
    few = fewest(sources)
    found = {}
    for name, target in targets.items():
        releases = {str(release) for each in sources[name].values() for release in each}
        found[name] = Place(target, next(release for release in few if release in releases))
    beside = [(fix, target) for fix, target in load().targets() if not target.module.startswith("vllm.")]
    return found | {f"{fix.id} {target.function}": Place(target, *FLASHINFER) for fix, target in beside}


class NotThere(Exception):
    """This function has nothing that could be altered in this way."""


class Altered:
    """A copy of one function of a release, and the first place in it that its fix would exchange."""

    def __init__(self, site: str) -> None:
        place = places()[site]
        self.form, self.release, self.target, source = place.form, Version(place.release), place.target, place.source
        definition = source.named(self.target.qualname)[-1]
        self.function = copy.deepcopy(definition)
        self.before: list[ast.stmt] = []  # what stands in the class before the function
        if any(rewrite.needs() for rewrite in self.target.rewrites):
            scope = source.scope(definition)
            self.before = [copy.deepcopy(each) for each in getattr(scope, "body", []) if each is not definition]
        self.match: Match | None = None
        if self.target.rewrites:
            self.match = self.target.rewrites[0].matches(self.function)[0]

    @property
    def node(self) -> Any:
        assert self.match is not None
        return self.match.nodes[0]

    @property
    def place(self) -> tuple[list[ast.stmt], int]:
        """The block in which the exchanged statement stands, or the statement of which it is a part; and where."""
        for statement, block, _, _ in _statements(self.function, None):
            own = statement is self.node or isinstance(self.node, ast.expr)
            if own and any(inner is self.node for inner in ast.walk(statement)):
                place = block, [each is statement for each in block].index(True)
        return place

    @property
    def statement(self) -> ast.stmt:
        block, at = self.place
        return block[at]

    @property
    def call(self) -> ast.Call:
        """The call that copies; in a loop, the last."""
        if self.match is None:
            return next(n for n in ast.walk(self.function) if isinstance(n, ast.Call) and called(n) == "to")
        calls = [n for n in ast.walk(self.node) if isinstance(n, ast.Call) and called(n) not in ("zip", "cat")]
        if not calls:
            raise NotThere("nothing is called there")
        return calls[0] if isinstance(self.node, ast.expr) else calls[-1]

    def put_in(self, text: str) -> None:
        """`text` in place of the statement; STATEMENT in it is the statement itself."""
        block, at = self.place
        new = ast.parse(text).body
        for node in [inner for statement in new for inner in ast.walk(statement)]:
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    value[:] = [
                        block[at] if ast.unparse(v) == "STATEMENT" else v for v in value if isinstance(v, ast.AST)
                    ]
        block[at : at + 1] = [block[at] if ast.unparse(v) == "STATEMENT" else v for v in new]

    def exchange(self, new: ast.AST) -> None:
        """`new` in place of the exchanged expression or statement."""
        for parent in ast.walk(self.function):
            for name, value in ast.iter_fields(parent):
                if value is self.node:
                    setattr(parent, name, new)
                elif isinstance(value, list) and any(each is self.node for each in value):
                    value[[each is self.node for each in value].index(True)] = new

    def text(self) -> str:
        *scopes, _ = self.target.qualname.split(".")
        body: list[ast.stmt] = [*self.before, self.function]
        for scope in reversed(scopes):
            extra: Any = {"type_params": []} if "type_params" in ast.ClassDef._fields else {}
            body = [ast.ClassDef(scope, [], [], body, [], **extra)]
        return ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))

    def judged(self) -> Recognition:
        return recognise_statically(self.target, ModuleSource(self.text().encode(), "altered.py"), self.release)


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


# -- alterations ----------------------------------------------------------------------------------------------------------


def nothing(a: Altered) -> None:
    """Formatting and comments: what is judged has been written anew from the syntax tree."""


def docstring(a: Altered) -> None:
    a.function.body.insert(0, ast.Expr(ast.Constant("Another text.")))


def annotations(a: Altered) -> None:
    for argument in (*a.function.args.args, *a.function.args.kwonlyargs):
        argument.annotation = ast.Name("Another", ast.Load())
    a.function.returns = ast.Name("Another", ast.Load())


def renamed_variable(a: Altered) -> None:
    """Every local name that the manifest does not name itself."""
    patterns = [p for r in a.target.rewrites for p in (r.find, r.put)]
    kept = {"self", *(name for pattern in patterns for name in pattern.names())}
    for rewrite in a.target.rewrites:
        header = parse_inside(rewrite.inside or "")
        kept |= {n.id for n in ast.walk(header) if isinstance(n, ast.Name)} if header else set()
    stored = {n.id for n in ast.walk(a.function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(a.function):
        if isinstance(node, ast.Name) and node.id in stored - kept:
            node.id = f"{node.id}_of_ours"


def renamed_named_variable(a: Altered) -> None:
    """The names that the manifest does name."""
    names = {n for n in a.target.rewrites[0].find.names() if n not in ("self", "zip", "torch")}
    if not names:
        raise NotThere("the manifest names none")
    for node in ast.walk(a.node):
        if isinstance(node, ast.Name) and node.id in names:
            node.id = f"{node.id}_of_ours"


def keyword_order(a: Altered) -> None:
    if len(a.call.keywords) < 2:
        raise NotThere("fewer than two keywords")
    a.call.keywords.reverse()


def default_argument(a: Altered) -> None:
    a.function.args.kwonlyargs.append(ast.arg("verbose"))
    a.function.args.kw_defaults.append(ast.Constant(False))


def decorator(a: Altered) -> None:
    a.function.decorator_list.insert(0, ast.Name("traced", ast.Load()))


def statement_before(a: Altered) -> None:
    a.function.body.insert(0, ast.parse("logger.debug('called')").body[0])


def reordered(a: Altered) -> None:
    a.function.body.insert(0, ast.parse("a = 1").body[0])
    a.function.body.insert(0, ast.parse("b = 2").body[0])
    a.function.body[0], a.function.body[1] = a.function.body[1], a.function.body[0]


def statement_beside(a: Altered) -> None:
    a.put_in("before()\nSTATEMENT\nafter()" if not isinstance(a.statement, ast.Return) else "before()\nSTATEMENT")


def other_device(a: Altered) -> None:
    """Expressions for which the manifest has a wildcard."""
    if not _device_is_free(a):
        raise NotThere("the manifest names the device")
    _on_another_device(a)


def other_device_than_is_named(a: Altered) -> None:
    if _device_is_free(a):
        raise NotThere("any device will do")
    _on_another_device(a)


def _device_is_free(a: Altered) -> bool:
    if called(a.call) != "to":
        raise NotThere("no device is named")
    device = a.call.args[0] if a.call.args else a.call.keywords[0].value
    return a.match is not None and any(bound is device for bound in a.match.bound.values())


def _on_another_device(a: Altered) -> None:
    other = ast.parse("self.config.device_of(rank=0)", mode="eval").body
    if a.call.args:
        a.call.args[0] = other
    else:
        a.call.keywords[0].value = other


def other_source(a: Altered) -> None:
    if called(a.call) != "to" or "SRC" not in a.target.rewrites[0].find.text:
        raise NotThere("the manifest names the source")
    assert isinstance(a.call.func, ast.Attribute)
    a.call.func.value = ast.parse("self.another_buffer[:n]", mode="eval").body


def other_buffer(a: Altered) -> None:
    """Another attribute or function where the manifest names one."""
    if called(a.call) == "to":
        raise NotThere("the manifest names none")
    inner = [n for n in ast.walk(a.call.func) if isinstance(n, (ast.Attribute, ast.Name))]
    named = next((n for n in inner if isinstance(n, ast.Attribute) and n.attr not in ("gpu", "cpu", "copy_")), None)
    if named is None:
        raise NotThere("the manifest names none")
    named.attr = "another"


def second_copy(a: Altered) -> None:
    block, at = a.place
    block.insert(at, copy.deepcopy(block[at]))


def moved_away(a: Altered) -> None:
    helper = ast.parse("def _copy_of_ours(self, *args):\n    pass").body[0]
    assert isinstance(helper, ast.FunctionDef)
    helper.body = [a.statement]
    a.before.append(helper)
    a.put_in("result = self._copy_of_ours(a, b)")


def taken_out(a: Altered) -> None:
    a.put_in("pass")


def other_keyword(a: Altered) -> None:
    for keyword in a.call.keywords:
        if isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
            keyword.value = ast.Constant(False)
            return
    raise NotThere("no keyword is True")


def keyword_gone(a: Altered) -> None:
    before = len(a.call.keywords)
    a.call.keywords[:] = [k for k in a.call.keywords if k.arg != "non_blocking"]
    if len(a.call.keywords) == before:
        raise NotThere("non_blocking is not given")


def further_keyword(a: Altered) -> None:
    a.call.keywords.append(ast.keyword("memory_format", ast.Name("layout", ast.Load())))


def further_argument(a: Altered) -> None:
    a.call.args.append(ast.Name("more", ast.Load()))


def other_function(a: Altered) -> None:
    """The same arguments, handed to something else."""
    if isinstance(a.call.func, ast.Attribute):
        a.call.func.attr = f"{a.call.func.attr}_of_ours"
    else:
        a.call.func = ast.parse("vendor.copy", mode="eval").body


def other_columns(a: Altered) -> None:
    slices = [n for n in ast.walk(a.node) if isinstance(n, ast.Slice) and n.upper is not None]
    if not slices or isinstance(a.call.func, ast.Name):
        raise NotThere("nothing is sliced")
    slices[-1].lower = ast.Constant(1)


def condition_around(a: Altered) -> None:
    a.put_in("if self.vendor_says_so:\n    STATEMENT")


def stream_around(a: Altered) -> None:
    a.put_in("with torch.cuda.stream(self.vendor_stream):\n    STATEMENT")


def try_around(a: Altered) -> None:
    a.put_in("try:\n    STATEMENT\nexcept RuntimeError:\n    pass")


def loop_around(a: Altered) -> None:
    a.put_in("for attempt in range(3):\n    STATEMENT")


def other_branch(a: Altered) -> None:
    a.put_in("if self.vendor_says_so:\n    pass\nelse:\n    STATEMENT")


def in_a_lambda(a: Altered) -> None:
    if isinstance(a.node, ast.stmt):
        raise NotThere("statements do not stand in one")
    make = ast.parse("(lambda: 0)()", mode="eval").body
    inner = copy.deepcopy(a.node)
    make.func.body = inner  # type: ignore[attr-defined]
    a.exchange(make)


def result_used_further(a: Altered) -> None:
    if isinstance(a.node, ast.stmt):
        raise NotThere("statements have no result")
    make = ast.parse("vendor.record(0)", mode="eval").body
    make.args[0] = copy.deepcopy(a.node)  # type: ignore[attr-defined]
    a.exchange(make)


def changed_condition(a: Altered) -> None:
    inside = a.match.inside if a.match else None
    if not isinstance(inside, ast.If):
        raise NotThere("it stands under no condition")
    inside.test = ast.BoolOp(ast.And(), [inside.test, ast.Name("more", ast.Load())])


def upstream_s_fix(a: Altered) -> None:
    if not (all(rewrite.upstream for rewrite in a.target.rewrites) and a.target.rewrites):
        raise NotThere("upstream has no fix of its own there")
    for number, rewrite in enumerate(a.target.rewrites):
        a.match = rewrite.matches(a.function)[0] if number else a.match
        a.exchange(ast.parse(rewrite.upstream[0].text, mode="eval").body)


def upstream_s_fix_beside_it(a: Altered) -> None:
    if not (all(rewrite.upstream for rewrite in a.target.rewrites) and a.target.rewrites):
        raise NotThere("upstream has no fix of its own there")
    a.function.body += [ast.parse(rewrite.upstream[0].text).body[0] for rewrite in a.target.rewrites]


def half_of_upstream_s_fix(a: Altered) -> None:
    fixes = {rewrite.upstream[0].text if rewrite.upstream else None for rewrite in a.target.rewrites}
    if len(fixes) < 2 or None in fixes:
        raise NotThere("there is one thing to fix")
    a.exchange(ast.parse(a.target.rewrites[0].upstream[0].text, mode="eval").body)


def renamed_function(a: Altered) -> None:
    a.function.name = f"{a.function.name}_of_ours"


def defined_again(a: Altered) -> None:
    again = copy.deepcopy(a.function)
    again.body = ast.parse("return None").body
    a.before.append(again)


def renamed_attribute_that_ours_needs(a: Altered) -> None:
    """In the whole class."""
    needed = {name for rewrite in a.target.rewrites for name in rewrite.needs()}
    if not needed:
        raise NotThere("it needs none that is not in the exchanged expression")
    for node in [inner for part in (a.function, *a.before) for inner in ast.walk(part)]:
        if isinstance(node, ast.Attribute) and node.attr in needed:
            node.attr = f"{node.attr}_of_ours"


@dataclass(frozen=True)
class Alteration:
    change: Callable[[Altered], None]
    verdicts: dict[str, str]  # by the form of the fix; forms that are not here are not tried
    but: dict[str, str]  # by target, where it is another


def _of(change: Callable[[Altered], None], *verdicts: str, but: dict[str, str] | None = None) -> Alteration:
    """`verdicts`: of whole functions, of placed and of free expressions, of loops; or one for all of these."""
    each = verdicts if len(verdicts) == 4 else verdicts * 4
    return Alteration(change, {form: v for form, v in zip(FORMS, each, strict=True) if v}, but or {})


A, R, U, N = "applies", "refused", "upstream", "absent"
# The manifest leaves open what any copy of that kind may have (its source, its device) and what is handed on to the
# release's own call (the arguments of a plan). Of a free expression, it does not matter where it stands.
HANDED_ON = {"flashinfer-plan vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.build": A}
# A keyword that `swap_blocks` does not know, it hands on too, and does nothing itself.
_TRANSFER = "SingleDirectionOffloadingHandler.transfer_async"
LEFT_TO_IT = {
    **HANDED_ON,
    f"kv-swap vllm.v1.kv_offload.worker.cpu_gpu:{_TRANSFER} #3": A,
    f"kv-swap vllm.v1.kv_offload.cpu.gpu_worker:{_TRANSFER}": A,
    f"kv-swap vllm.v1.kv_offload.cpu.gpu_worker:{_TRANSFER} #2": A,
}
_BATCH = "kv-swap vllm.v1.simple_kv_offload.cuda_mem_ops:copy_blocks"
ANY_NAME = {_BATCH: A, f"{_BATCH} #2": A}  # with the arguments of the driver's batch
ALTERATIONS = [
    _of(nothing, A),
    _of(docstring, A),
    _of(annotations, A),
    _of(renamed_variable, "", A, A, A),
    _of(renamed_named_variable, "", R, R, R),
    _of(keyword_order, R, A, A, A),
    _of(default_argument, R, A, A, A),
    _of(decorator, R, A, A, A),
    _of(statement_before, R, A, A, A),
    _of(reordered, R, A, A, A),
    _of(statement_beside, "", A, A, A),
    _of(other_device, "", A, A, ""),
    _of(other_device_than_is_named, R, R, R, ""),
    _of(other_source, "", A, A, ""),
    _of(other_buffer, "", R, R, R),
    _of(second_copy, "", R, R, R),
    _of(moved_away, "", R, R, R),
    _of(taken_out, "", R, R, R),
    _of(other_keyword, R, but=HANDED_ON),
    _of(keyword_gone, R),
    _of(further_keyword, R, but=LEFT_TO_IT),
    _of(further_argument, R, but=HANDED_ON),
    _of(other_function, R, but=ANY_NAME),
    _of(other_columns, "", R, R, ""),
    _of(condition_around, "", R, A, R),
    _of(stream_around, "", R, A, A),  # loops stand under a stream, and copy on whichever is current
    _of(try_around, "", R, A, R),
    _of(loop_around, "", R, A, R),
    _of(other_branch, "", R, A, R),
    _of(in_a_lambda, "", R, "", ""),
    _of(result_used_further, "", R, A, ""),
    _of(changed_condition, "", R, "", ""),
    _of(upstream_s_fix, "", U, U, ""),
    _of(upstream_s_fix_beside_it, "", U, U, ""),
    _of(half_of_upstream_s_fix, "", R, R, ""),
    _of(renamed_function, N),
    _of(defined_again, R),
    _of(renamed_attribute_that_ours_needs, "", R, R, R),
]


@pytest.mark.parametrize("alteration", ALTERATIONS, ids=lambda alteration: alteration.change.__name__)
def test_an_altered_function_is_judged_by_what_it_means(alteration: Alteration) -> None:
    wrong, tried = [], 0
    for site, place in places().items():
        if place.form not in alteration.verdicts:
            continue
        altered = Altered(site)
        try:
            alteration.change(altered)
        except NotThere:
            continue
        tried += 1
        found = altered.judged()
        expected = alteration.but.get(site, alteration.verdicts[place.form])
        if found.verdict.value != expected or not (found.reason or expected == A):
            wrong.append(f"{site}: {found.verdict.value} ({found.reason}), not {expected}\n{altered.text()}")
    assert not wrong, "\n\n".join(wrong)
    assert tried, "on no function of any release"


def test_there_are_at_least_thirty_alterations_of_every_target() -> None:
    assert len({alteration.change for alteration in ALTERATIONS}) >= 30
    assert {name for alteration in ALTERATIONS for name in alteration.but} <= set(places())
    assert len(places()) == len(list(load().targets()))
