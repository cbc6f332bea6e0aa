"""Every form that a target's function has over the releases, and what is needed to run it alone.

Nothing of the release is imported: the function is compiled from its source, what else it needs of its own module and
class is compiled with it, and all else is pretended (pretended.py) but for what a case (cases_*.py) gives.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pretended import Pretended

from h2d_patch.manifest import load
from h2d_patch.patching.recognise import Target
from h2d_patch.patching.rewrite import ModuleSource, _imports, first_line
from h2d_patch.releases import named, shipped

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch
from releases import applying, fewest

CPU = torch.device("cpu")
# FlashInfer's own functions are not in the table: by what their sources are, a version of it that vLLM asks for.
FLASHINFER = {
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan": {
        "eaab66e7a734f54d": "0.6.8.post1",
        "e82a5d2cc31b88f6": "0.6.11.post2",
        "2a4ad37c6b22d3f7": "0.6.16.post3",
        "58fef9bcde93d886": "0.6.18",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan": {
        "5981ff324815c229": "0.6.11.post2",
        "f285e3ee00031907": "0.6.13",
    },
    "flashinfer.decode:fast_decode_plan": {"8b49a5909c908dea": "0.6.11.post2", "ba1b0792ece6d84b": "0.6.18"},
}
REAL = {"torch", "numpy", "einops", *sys.stdlib_module_names}
# What stands around a function of a release and does nothing that matters here.
PLAIN_DECORATORS = ("lru_cache", "cache", "staticmethod", "inference_mode", "torch.inference_mode", "override")


@dataclass(frozen=True)
class Form:
    """A target and one source that its function has, by the names of the table; `releases` have it, oldest first."""

    target: str
    function: str
    source: str
    releases: tuple[str, ...]

    @property
    def qualname(self) -> str:
        return self.function.partition(":")[2]

    @property
    def release(self) -> str:
        """The one that is run, of those with this form: one that other forms are run of too."""
        return next((release for release in _chosen() if release in self.releases), self.releases[-1])

    def __str__(self) -> str:
        return f"{self.target} {self.source} ({self.release})"


@functools.cache
def forms() -> tuple[Form, ...]:
    """Every form in which a target applies to a release of the table, or to a version of FlashInfer."""
    found = [
        Form(name, targets()[name].function, source, tuple(map(str, releases)))
        for name, sources in applying(shipped()).items()
        for source, releases in sources.items()
    ]
    beside = {target.function: name for name, target in targets().items() if target.function in FLASHINFER}
    for function, sources in FLASHINFER.items():
        found += [Form(beside[function], function, source, (version,)) for source, version in sources.items()]
    return tuple(found)


@functools.cache
def _chosen() -> list[str]:
    return fewest(applying(shipped()))


@functools.cache
def targets() -> dict[str, Target]:
    """Every target, by its name in the table, or what that would be."""
    beside = {
        f"{fix.id} {target.function}": target for fix, target in load().targets() if target.function in FLASHINFER
    }
    return {**dict(named(load().targets())), **beside}


@functools.lru_cache(maxsize=8)
def source_of(release: str, module: str) -> ModuleSource:
    folder = fetch(release) if module.startswith("vllm.") else fetch(release, "flashinfer-python")
    path = folder / f"{module.replace('.', '/')}.py"
    return ModuleSource(path.read_bytes(), str(path))


class World:
    """One release's module, as one of its functions sees it in one run."""

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.log: list[Any] = []
        self.watched: list[Any] = []
        self.names: dict[str, Any] = {"__name__": "vllm.pretended"}
        self.names["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self._bindings = {
            alias.asname or alias.name.partition(".")[0]: node
            for node in _imports(source.tree)
            for alias in node.names  # type: ignore[attr-defined]
        }
        self._defined = {getattr(node, "name", ""): node for node in source.tree.body}
        self._assigned = {
            target.id: node.value
            for node in source.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def give(self, **names: Any) -> None:
        """Names of the module that are not to be pretended."""
        self.names.update(names)

    def pretend(self, name: str, **given: Any) -> Any:
        return Pretended(name, self.log, **given)

    def owner(self, qualname: str, own: Collection[str] | None = None, **given: Any) -> Any:
        """An object of the class that `qualname` is defined in, with the methods that its release gives it.

        `own`: only these; the others are pretended.
        """
        kind = qualname.rpartition(".")[0]

        def method(owner: Any, name: str) -> Any:
            return self._method(owner, kind, name) if own is None or name in own else None

        made = Pretended(kind, self.log, method, **given)
        self.watched.append(made)
        return made

    def takes(self, qualname: str, *names: str) -> list[str]:
        """Those of `names` that are arguments of the function."""
        arguments = self.source.named(qualname)[-1].args
        known = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
        return [name for name in names if name in known]

    def function(self, qualname: str) -> types.FunctionType:
        """A function of the module, without the decorators around it."""
        node = self.source.named(qualname)[-1]
        code = _compiled(self.source, qualname)
        self._resolve(code)
        defaults = tuple(self._evaluated(default) for default in node.args.defaults) or None
        made = types.FunctionType(
            code, self.names, node.name, defaults, tuple(types.CellType() for _ in code.co_freevars)
        )
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        made.__kwdefaults__ = {arg.arg: self._evaluated(default) for arg, default in pairs if default is not None}
        return made

    def _method(self, owner: Any, kind: str, name: str) -> Any:
        found = self.source.named(f"{kind}.{name}")
        if not found:
            return None
        decorators = [ast.unparse(each).partition("(")[0] for each in found[-1].decorator_list]
        function = self.function(f"{kind}.{name}")
        if "property" in decorators:
            return function(owner)
        return function if "staticmethod" in decorators else functools.partial(function, owner)

    def _resolve(self, code: types.CodeType) -> None:
        for name in _global_names(code):
            if name not in self.names and not hasattr(builtins, name):
                self.names[name] = Pretended(
                    name, self.log
                )  # while it is being looked for: functions that call themselves
                self.names[name] = self._found(name)

    def _found(self, name: str) -> Any:
        if name in self._bindings:
            node = self._bindings[name]
            module = getattr(node, "module", "") or node.names[0].name  # type: ignore[attr-defined]
            if module.partition(".")[0] in REAL and not getattr(node, "level", 0):
                made: dict[str, Any] = {}
                with contextlib.suppress(ImportError):
                    exec(compile(ast.Module([node], []), "<import>", "exec"), made)
                    return made[name]
        node = self._defined.get(name)
        if isinstance(node, ast.FunctionDef):
            if all(ast.unparse(each).partition("(")[0] in PLAIN_DECORATORS for each in node.decorator_list):
                return self.function(name)
        elif name in self._assigned:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(self._assigned[name])
        return self.names[name]

    def _evaluated(self, node: ast.expr) -> Any:
        with contextlib.suppress(ValueError):
            return ast.literal_eval(node)
        code = compile(ast.Expression(node), "<default>", "eval")
        self._resolve(code)
        return eval(code, self.names)

    def _import(self, name: str, *args: Any) -> Any:
        if name.partition(".")[0] in REAL:
            return __import__(name, *args)
        return self.names.get(name) or Pretended(name, self.log)


@functools.lru_cache(maxsize=256)
def _compiled(source: ModuleSource, qualname: str) -> types.CodeType:
    node = source.named(qualname)[-1]
    like: Any = SimpleNamespace(co_filename=source.filename, co_name=node.name, co_firstlineno=first_line(node))
    (code,) = source._compile(node, source._chain[id(node)], like)
    return code


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


Call = Callable[[Callable[..., Any]], Any]
Case = Callable[[World, Form], Call]
CASES: dict[str, Case] = {}
# Places in a function that no run of it on the CPU can come to, each with the reason.
PASSED_BY: dict[str, tuple[str, ...]] = {}


def case(*functions: str) -> Callable[[Case], Case]:
    """The case of these functions, `module:qualname`: gives a world what it needs, and says how they are called."""

    def register(made: Case) -> Case:
        for function in functions:
            assert function not in CASES, function
            CASES[function] = made
        return made

    return register
