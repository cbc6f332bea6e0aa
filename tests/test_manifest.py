"""A manifest is read whole or refused with the file, the key, what was found and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2d_patch.manifest import ManifestError, load

GOOD = """
manifest = 1
[patch.my-fix]
why = "positions of our own model"
[[patch.my-fix.target]]
function = "our.model:Model.forward"
[[patch.my-fix.target.rewrite]]
find = "SRC.to(DEV, non_blocking=True)"
put = "to_device(SRC, DEV)"
"""


def read(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "user.toml"
    path.write_text(text)
    return load(path)


def test_the_shipped_manifest_has_the_nine_fixes_and_says_why_for_each() -> None:
    fixes = load().fixes
    assert list(fixes) == [
        "multimodal-h2d",
        "vision-rope",
        "vision-h2d",
        "mrope-positions",
        "flashinfer-plan",
        "kv-swap",
        "mla-context",
        "runner-v2-copies",
        "list-tensors",
    ]
    assert all(fix.risk.endswith(".") and fix.retire.endswith(".") for fix in fixes.values())
    assert all(fix.why.endswith(".") and fix.upstream.startswith("vllm-project/vllm#") for fix in fixes.values())
    off = {"flashinfer-plan", "list-tensors", "runner-v2-copies"}
    assert {fix.id for fix in fixes.values() if not fix.default} == off


def test_every_shipped_target_has_stand_ins_for_its_self_test() -> None:
    for fix, target in load().targets():
        parts = [target.replace] if target.replace else target.rewrites
        # Where nothing of ours is called there is nothing to test: pinned memory is left out, and the copy behind it tested.
        tested = [part for part in parts if target.replace or part.put.called()]
        assert tested and all(part.given for part in tested), (fix.id, target.function)


def test_a_user_s_file_adds_fixes_of_the_same_form(tmp_path: Path) -> None:
    fixes = read(tmp_path, GOOD).fixes
    assert "kv-swap" in fixes and fixes["my-fix"].default is True
    assert fixes["my-fix"].targets[0].qualname == "Model.forward"
    assert (fixes["my-fix"].risk, fixes["my-fix"].retire) == ("", "")


def test_a_user_s_file_overrides_a_default(tmp_path: Path) -> None:
    fixes = read(
        tmp_path, "manifest = 1\n[patch.kv-swap]\ndefault = false\n[patch.flashinfer-plan]\ndefault = true\n"
    ).fixes
    assert (fixes["kv-swap"].default, fixes["flashinfer-plan"].default) == (False, True)
    assert fixes["kv-swap"].targets


BROKEN = {
    "not TOML": ("manifest = ", "not TOML"),
    "no schema": ("[patch.x]\nwhy = 'x'", "manifest: missing; expected manifest = 1"),
    "a later schema": (GOOD.replace("manifest = 1", "manifest = 2"), "manifest: 2; expected manifest = 1"),
    "a misspelt key": (GOOD.replace("why =", "reason ="), "patch.my-fix.why: missing; expected a string"),
    "an extra key": (GOOD.replace("why =", "whom = 1\nwhy ="), "patch.my-fix.whom: unknown key, found 1"),
    "a key at the top": ("author = 'me'\n" + GOOD, "author: unknown key"),
    "a wrong type": (GOOD.replace('"positions of our own model"', "7"), "patch.my-fix.why: found 7; expected a string"),
    "a default in quotes": (GOOD.replace("why =", "default = 'yes'\nwhy ="), "patch.my-fix.default: found 'yes'"),
    "a risk in a list": (GOOD.replace("why =", "risk = ['x']\nwhy ="), r"patch.my-fix.risk: found \['x'\]; expected a string"),
    "an empty risk": (GOOD.replace("why =", "risk = ' '\nwhy ="), "patch.my-fix.risk: found an empty string; expected some text"),
    "a retire that is a date": (GOOD.replace("why =", "retire = 2026-11-30\nwhy ="), "patch.my-fix.retire: found datetime.date"),
    "no target": ("manifest = 1\n[patch.my-fix]\nwhy = 'x'", "patch.my-fix.target: none"),
    "a target that is no table": ("manifest = 1\n[patch.my-fix]\nwhy = 'x'\ntarget = [1]", "patch.my-fix.target: found"),
    "a function without a module": (GOOD.replace("our.model:Model.forward", "forward"), r"target\[0\].function: 'forward'"),
    "a bad range": (GOOD.replace("[[patch.my-fix.target.rewrite]]", "releases = 'new'\n[[patch.my-fix.target.rewrite]]"), "releases: 'new'; expected a version range"),
    "a bad version": (GOOD.replace("[[patch.my-fix.target.rewrite]]", "fixed_in = 'soon'\n[[patch.my-fix.target.rewrite]]"), "fixed_in: 'soon'; expected a version"),
    "neither form": (GOOD[: GOOD.index("[[patch.my-fix.target.rewrite]]")], "neither of 'rewrite' and 'replace'"),
    "a pattern that is no Python": (GOOD.replace("SRC.to(DEV,", "SRC.to((DEV,"), r"target\[0\].rewrite\[0\].find: not Python"),
    "a put that calls something else": (GOOD.replace("to_device(SRC", "eval(SRC"), r"rewrite\[0\].put: calls 'eval'; expected only functions of h2d_patch.copies"),
    "a put that calls what it is given": (GOOD.replace("to_device(SRC, DEV)", "call_pinned(os.system, SRC)"), r"rewrite\[0\].put: call_pinned would call 'os.system'; expected what 'find' calls"),
    "a number without end": ("manifest = " + "1" * 5000, "manifest"),
    "nesting without end": ("x = " + "[" * 5000, "not TOML|manifest"),
    "a version without end": (GOOD.replace("[[patch.my-fix.target.rewrite]]", "fixed_in = '" + "1" * 5000 + "'\n[[patch.my-fix.target.rewrite]]"), "fixed_in: '111"),
    "a pattern without end": (GOOD.replace("SRC.to(DEV,", "SRC.to(DEV" + "+1" * 3000 + ","), "find: not Python"),
    "an inside with a branch": (GOOD + "inside = 'if a:\\n  pass\\nelse'\n", "inside: "),
    "stand-ins that reach inside": (GOOD + 'given = ["SRC = tensor.__self__"]\n', "given: "),
    "stand-ins that take a word": (GOOD + 'given = ["size = tensor"]\n', "given: "),
    "times of zero": (GOOD + "times = 0\n", r"times: 0; expected a number above 0"),
    "times in words": (GOOD + "times = 'once'\n", r"times: 'once'"),
    "an inside that is no header": (GOOD + "inside = 'x = 1'\n", "inside: "),
    "stand-ins that run code": (GOOD + 'given = ["SRC = open(1)"]\n', r"given: 'open\(1\)'"),
    "stand-ins that assign nothing": (GOOD + 'given = ["tensor(1)"]\n', "given: found 'tensor"),
    "a target for a shipped fix": (GOOD.replace("my-fix", "kv-swap").replace("why =", "default = true\nwhy ="), "patch.kv-swap.why: unknown key.*only 'default', since patches.toml defines this fix"),
    "a fix of a shipped name": (GOOD.replace("my-fix", "kv-swap"), "patch.kv-swap: found why, target; expected only 'default', since patches.toml"),
    "an id in capitals": (GOOD.replace("my-fix", "My_Fix"), "patch.My_Fix: found this id"),
    "a replacement of unknown name": (GOOD[: GOOD.index("[[patch.my-fix.target.rewrite]]")] + "[patch.my-fix.target.replace]\nput = 'x'\nknown = []\n", "replace.put: 'x'"),
    "a hash that is none": (GOOD[: GOOD.index("[[patch.my-fix.target.rewrite]]")] + "[patch.my-fix.target.replace]\nput = 'to_device'\nknown = ['x']\n", "replace.known: 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_manifest_is_one_clear_line(tmp_path: Path, what: str) -> None:
    text, says = BROKEN[what]
    with pytest.raises(ManifestError, match=says) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'user.toml'}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.toml.*H2D_PATCH_MANIFEST"):
        load(tmp_path / "nowhere.toml")
