"""Verdicts come from the source; the release only says what to expect where the source says nothing."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from h2d_patch.patching.pattern import Pattern, parse_put
from h2d_patch.patching.recognise import Replace, Target, recognise_statically, source_hash
from h2d_patch.patching.rewrite import ModuleSource, Rewrite

FIND = Pattern.parse("SRC.to(DEV, non_blocking=True)")
PUT = parse_put("to_device(SRC, DEV)", FIND, {"to_device"})
OLD = "def f(x, d):\n    return x.to(d, non_blocking=True)\n"
FIXED = "def f(x, d):\n    return async_tensor_h2d(x, d)\n"
OTHER = "def f(x, d):\n    return x.cuda(d)\n"


def target(releases: str = "<0.28", supersedes: str | None = None) -> Target:
    upstream = (Pattern.parse("async_tensor_h2d(SRC, DEV)"),)
    return Target(
        "m:f",
        SpecifierSet(releases),
        rewrites=(Rewrite(FIND, PUT, upstream=upstream),),
        fixed_in="0.28.0",
        supersedes=supersedes,
        note="a note",
    )


def verdict(source: str | None, release: str | None, of: Target | None = None) -> tuple[str, str]:
    module = ModuleSource(source.encode(), "m.py") if source is not None else None
    found = recognise_statically(of or target(), module, Version(release) if release else None)
    return found.verdict.value, found.reason


@pytest.mark.parametrize("release", ["0.22.1", "0.22.1+vendor", "0.28.0.dev3", "0.99", None])
def test_a_known_source_applies_whatever_the_release_is_called(release: str | None) -> None:
    assert verdict(OLD, release) == ("applies", "a note")


@pytest.mark.parametrize("release", ["0.22.1", "0.28.0", None])
def test_upstream_s_fix_is_seen_in_any_release(release: str | None) -> None:
    assert verdict(FIXED, release) == ("upstream", "this release has upstream's own fix (since 0.28.0)")


def test_an_unknown_source_is_refused_where_the_fault_is_expected_and_absent_elsewhere() -> None:
    assert verdict(OTHER, "0.22.1")[0] == "refused"
    assert verdict(OTHER, None)[0] == "refused"
    assert verdict(OTHER, "0.30.0") == (
        "absent",
        "not in this release: the fault is in vLLM <0.28, and here the copying expression occurs 0 times in it, expected 1",
    )


def test_signatures_for_type_checkers_in_front_of_a_function_do_not_count() -> None:
    for decorator in ("overload", "typing.overload"):
        source = f"@{decorator}\ndef f(x: int, d): ...\n@{decorator}\ndef f(x: str, d): ...\n{OLD}"
        assert verdict(source, "0.22.1") == ("applies", "a note")
    assert verdict(f"{OLD}{OTHER}", "0.22.1")[0] == "refused"


def test_what_supersedes_upstream_s_fix_applies_beside_it_and_says_why() -> None:
    both = OLD + "    async_tensor_h2d(x, d)\n"
    assert verdict(both, "0.30.0")[0] == "upstream"
    assert verdict(both, "0.30.0", target(supersedes="it is faster")) == (
        "applies",
        "ours takes the place of upstream's fix: it is faster",
    )


def test_a_missing_module_or_function_is_absent() -> None:
    assert verdict(None, "0.22.1") == ("absent", "there is no module m here")
    assert verdict("def g(): pass\n", "0.22.1") == ("absent", "this release has no f in m")


def test_two_definitions_in_different_forms_are_refused() -> None:
    source = (
        "import sys\nif sys:\n"
        + "".join(f"    {line}\n" for line in OLD.splitlines())
        + "else:\n    def f(x, d): pass\n"
    )
    assert "defined 2 times" in verdict(source, "0.22.1")[1]


def test_a_replaced_function_is_known_by_what_its_source_means() -> None:
    known = source_hash(ModuleSource(OLD.encode(), "m.py").named("f")[0])
    replaced = Target("m:f", SpecifierSet("<0.28"), replace=Replace("to_device", frozenset({known})))
    dressed = 'def f(x: "Tensor", d=..., ):\n    """Copies."""\n    # now\n    return x.to(d, non_blocking = True)\n'
    assert verdict(OLD, "0.22.1", replaced)[0] == "applies"
    assert verdict(dressed.replace("d=..., ", "d"), "0.22.1", replaced)[0] == "applies"
    assert verdict(dressed, "0.22.1", replaced)[0] == "refused", "a default is part of the meaning"
    assert verdict("@cached\n" + OLD, "0.22.1", replaced)[0] == "refused", "a decorator too"
