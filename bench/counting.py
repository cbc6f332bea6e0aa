"""What a fix costs where it is, beyond its copy: switched off, counting, and timed for an A/B.

    python bench/counting.py --json bench/results/counting.json

Each arm is a function that calls another one, as a rewritten one of a release does, and the same without us. Medians
of rounds that take turns, so that a clock that speeds up or slows down does so for all. The cost of counting is that of
a call with all that the ledger and the arms keep, less that of one that only asks the switch and counts calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch

from h2d_patch.copies.call import falling_back, note
from h2d_patch.patching.install import build_rewrite, install_replacement
from h2d_patch.patching.locate import locate
from h2d_patch.patching.pattern import Pattern, parse_put
from h2d_patch.patching.rewrite import ModuleSource, Rewrite
from h2d_patch.patching.switch import Site

SOURCE = """
def copy(x):
    return x

def plain(x):
    return copy(x)

def expression(x):
    return copy(x)

def statements(x):
    for y in (x,):
        copy(y)

def plain_statements(x):
    for y in (x,):
        copy(y)

def uncounted(x):
    return site.swap(x) if site.on else copy(x)

def uncounted_statements(x):
    if site.on:
        site.swap((x,))
    else:
        for y in (x,):
            copy(y)

def replaced(x):
    return x
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument(
        "--calls", type=int, default=200, help="of each round: few, so that most rounds are not interrupted"
    )
    options = parser.parse_args()
    Site.compiling = staticmethod(torch.compiler.is_compiling)
    with module() as made:
        found = measure(made, options.rounds, options.calls)
    ns = {name: round(statistics.median(values), 1) for name, values in found.items()}
    costs = {
        "switched off: expression": ns["expression, off"] - ns["plain"],
        "switched off: statements": ns["statements, off"] - ns["plain statements"],
        "switched off: replaced function": ns["replaced, off"] - ns["original"],
        "switched off and timed for an A/B": ns["expression, off, timed"] - ns["plain"],
        "counting: expression": ns["expression, on"] - ns["uncounted, on"],
        "counting: statements": ns["statements, on"] - ns["uncounted statements, on"],
    }
    costs = {name: round(value, 1) for name, value in costs.items()}
    print(ns, costs, sep="\n")
    result = {
        "what": "ns a call",
        "settings": {"rounds": options.rounds, "calls": options.calls},
        "cost_ns": costs,
        "median_ns": ns,
        "ns": {name: [round(value, 1) for value in values] for name, values in found.items()},
        "complete": True,
    }
    record.write(options.json, result)


@contextmanager
def module() -> Iterator[types.ModuleType]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "copying_module.py"
        path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location("copying_module", path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules["copying_module"] = made
        spec.loader.exec_module(made)
        yield made


def attempt(x: Any) -> Any:
    note("staging", 1024)
    return x


def only_calls(made: types.ModuleType, site: Site) -> Callable[[Any], Any]:
    """A fixed copy that keeps nothing else."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        site.calls += 1
        return made.copy(*args, **kwargs)

    return bound


def measure(made: types.ModuleType, rounds: int, calls: int) -> dict[str, list[float]]:
    source = ModuleSource(Path(made.__file__ or "").read_bytes(), made.__file__ or "")
    bound = falling_back(attempt, made.copy)

    def put_in(name: str, find: str, put: str) -> Site:
        pattern = Pattern.parse(find)
        site = Site()
        site.bind("swap", bound(site))
        function = vars(made)[name]
        definition = source.definition_of(name, function.__code__)
        build_rewrite(function, source, definition, [Rewrite(pattern, parse_put(put, pattern, {"swap"}))], site)()
        return site

    expression = put_in("expression", "copy(X)", "swap(X)")
    statements = put_in("statements", "for A in B:\n    copy(A)", "swap(B)")
    located = locate(made, "replaced")
    assert located is not None
    site = Site()
    install_replacement(located, bound(site), site)
    uncounted = vars(made)["site"] = Site()
    uncounted.bind("swap", only_calls(made, uncounted))

    def state(on: bool, timed: bool = False) -> Callable[[], None]:
        def turn() -> None:
            for one in (expression, statements, site, uncounted):
                one.on, one.timed = on, timed

        return turn

    arms: dict[str, tuple[Callable[[], None], Callable[[Any], Any]]] = {
        "original": (state(False), made.copy),
        "plain": (state(False), made.plain),
        "plain statements": (state(False), made.plain_statements),
        "expression, off": (state(False), made.expression),
        "statements, off": (state(False), made.statements),
        "replaced, off": (state(False), made.replaced),
        "expression, off, timed": (state(False, True), made.expression),
        "uncounted, on": (state(True), made.uncounted),
        "uncounted statements, on": (state(True), made.uncounted_statements),
        "expression, on": (state(True), made.expression),
        "statements, on": (state(True), made.statements),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (turn, function) in arms.items():
            turn()
            found[name].append(ns_a_call(function, calls))
    return found


def ns_a_call(function: Callable[[Any], Any], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        function(1)
    return (time.perf_counter_ns() - start) / calls


if __name__ == "__main__":
    main()
