"""What an operator must set under Ray: nothing, where ray_env carries our variables; else what, and why."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..patching.rewrite import ModuleSource, Refused
from ..report.check import Installed
from . import ray_forms as forms


class Advice(NamedTuple):
    """Why our variables do not reach some of Ray's processes, and what to set."""

    why: str
    do: str


def advice(environ: Mapping[str, str], installed: Installed) -> list[Advice]:
    """What keeps our variables from Ray's processes with that vLLM and that environment; nothing where all is well."""
    try:
        found = list(_of_sources(installed))
    except (Refused, OSError, SyntaxError, ValueError) as error:
        found = [Advice(f"whether our variables reach Ray's workers cannot be told: {error}", forms.ON_THE_NODES)]
    return [*found, *_kept_back(environ)]


def _of_sources(installed: Installed) -> Iterator[Advice]:
    names = _source(installed, forms.NAMES_MODULE)
    values = _source(installed, forms.VALUES_MODULE)
    if names is not None:
        known = names.named(forms.NAMES_FUNCTION) and _mentions(names.tree, forms.NAMES_KEPT_BACK)
    else:
        method = f"{forms.VALUES_CLASS}.{forms.VALUES_METHOD}"
        known = values is not None and values.named(method) and _mentions(values.tree, forms.VALUES_KEPT_BACK)
    if not known:
        yield Advice("this vLLM copies variables to Ray's workers in a way that we do not know", forms.ON_THE_NODES)
        return
    engine = _source(installed, forms.ENGINE_MODULE)
    if engine is None or not _mentions(engine.tree, forms.LOADS_PLUGINS):
        yield Advice(
            "under Ray, the engine core of `vllm serve` loads no plugins in this release, and our variables do not "
            "reach its workers",
            forms.ON_THE_NODES,
        )
    for module in forms.ENGINES_MODULES:
        manager = _class(_source(installed, module), forms.ENGINES_CLASS)
        if manager is not None and not _mentions(manager, forms.NAMES_FUNCTION):
            yield Advice(
                "with --data-parallel-backend ray, this release copies no variables to its engine cores",
                forms.ON_THE_NODES,
            )


def _kept_back(environ: Mapping[str, str]) -> Iterator[Advice]:
    """What the operator's own file keeps from Ray's workers; vLLM itself goes on without a file that is damaged."""
    path = _config_root(environ) / forms.KEPT_BACK_FILE
    try:
        listed = [str(name) for name in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return
    if names := sorted(forms.ours(listed)):
        yield Advice(f"{path} keeps {', '.join(names)} from Ray's workers", f"take {', '.join(names)} out of that file")


def _config_root(environ: Mapping[str, str]) -> Path:
    """vLLM's configuration directory, as its own `VLLM_CONFIG_ROOT` gives it."""
    own = environ.get("VLLM_CONFIG_ROOT")
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(own or os.path.join(base, "vllm")))


def _source(installed: Installed, module: str) -> ModuleSource | None:
    path = installed.module(module)
    return ModuleSource(path.read_bytes(), str(path)) if path is not None else None


def _class(source: ModuleSource | None, name: str) -> ast.ClassDef | None:
    body = source.tree.body if source is not None else []
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _mentions(tree: ast.AST, name: str) -> bool:
    """Whether that name stands anywhere in it, as a variable or an attribute."""
    return any(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in ast.walk(tree))
