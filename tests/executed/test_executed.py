"""Every form of every target is run: the release's own function and ours do the same, or executed.json says why not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import forms
import torch
import watched
from executed_forms import FILE, document
from forms import Form
from proof import NotRun, prove, said, staging

from h2d_patch import copies
from h2d_patch.copies.call import falling_back

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter
RECORDED = json.loads(FILE.read_text(encoding="utf-8"))["executed"]
STALE = "executed.json is not of these forms and cases; `make releases` makes it anew"
ONE = next(form for form in forms.forms() if "Qwen2VisionTransformer.rot_pos_emb" in form.target)


@pytest.fixture(scope="module", autouse=True)
def sources_go_again() -> Iterator[None]:
    """Millions of objects: each collection of garbage would take as long as a test that comes later may."""
    yield
    forms.source_of.cache_clear()
    forms._compiled.cache_clear()


def test_every_form_of_the_table_is_recorded() -> None:
    executed = {form: RECORDED.get(form.target, {}).get(form.source, "missing") for form in forms.forms()}
    assert FILE.read_text(encoding="utf-8") == document(executed), STALE
    assert all(text == said(form) or text.startswith("no: ") for form, text in executed.items()), STALE


@pytest.mark.releases
@pytest.mark.parametrize("form", forms.forms(), ids=str)
def test_the_fixed_function_does_what_the_release_s_own_does(form: Form) -> None:
    recorded = RECORDED[form.target][form.source]
    if recorded.startswith("no: "):
        with pytest.raises(NotRun, match=re.escape(recorded)):
            prove(form)
    else:
        prove(form)


class Export:
    """A copy function in a form of its own."""

    def __init__(self, attempt: Any) -> None:
        self.original = copies.EXPORTS["to_device"].original
        self.bind = falling_back(attempt, self.original)


def late(source: Any, device: Any) -> Any:
    """Reads its source when the device gets to it."""
    ring = staging._thread.forced
    ring._reserved += 1
    result = source.clone()
    ring.link.copy(result.data_ptr(), source.data_ptr(), source.nbytes, 0)
    return result


def kept(source: Any, device: Any) -> Any:
    """Gives the source back."""
    staging._thread.forced._reserved += 1
    return source


@pytest.mark.releases
@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (late, "out of bounds"),  # an index made of what the source was overwritten with
        (kept, "to_device gives back its source"),
        (lambda source, device: 1 / 0, "an error of ours"),
        (lambda source, device: source.clone(), "no copy went through the staging ring"),
        (lambda source, device: copies.Declined("for a reason"), "for a reason"),
    ],
)
def test_a_copy_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, attempt: Any, says: str) -> None:
    monkeypatch.setattr(watched, "EXPORTS", {**copies.EXPORTS, "to_device": Export(attempt)})
    with pytest.raises((AssertionError, IndexError), match=says):
        prove(ONE)


@pytest.mark.releases
def test_a_case_that_does_not_come_to_the_copy_or_sees_nothing_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = forms.CASES[ONE.function]

    def without(world: Any, form: Form) -> Any:
        case(world, form)
        return lambda function: torch.ones(1)

    monkeypatch.setitem(forms.CASES, ONE.function, without)
    with pytest.raises(AssertionError, match="no copy function of ours was called"):
        prove(ONE)

    def unseen(world: Any, form: Form) -> Any:
        call = case(world, form)
        return lambda function: (call(function), torch.ones(1))[1]

    monkeypatch.setitem(forms.CASES, ONE.function, unseen)
    with pytest.raises(AssertionError, match="would not have been noticed"):
        prove(ONE)


@pytest.mark.releases
def test_a_form_that_touches_more_than_its_case_gives_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forms.CASES, ONE.function, lambda world, form: lambda function: function(world.owner("A.b"), 3))
    with pytest.raises(NotRun, match=r"no: it touches what has not been written down \(TypeError\)"):
        prove(ONE)
    monkeypatch.delitem(forms.CASES, ONE.function)
    with pytest.raises(NotRun, match="no: what it touches has not been written down"):
        prove(ONE)
