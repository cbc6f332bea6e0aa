"""What a bound function does when its fast way declines or breaks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from h2d_patch import copies
from h2d_patch.copies.call import Declined, falling_back, note


def test_a_result_of_the_fast_way_is_returned_and_the_original_does_not_run(ledger):
    bound = falling_back(lambda x: x + 1, lambda x: pytest.fail("the original ran"))(ledger)
    assert bound(1) == 2
    assert (ledger.calls, ledger.fallbacks) == (1, 0)


def test_none_is_a_result_like_any_other(ledger):
    assert falling_back(lambda: None, lambda: pytest.fail("the original ran"))(ledger)() is None


def test_a_counted_decline_runs_the_original_over_the_same_operands_and_is_counted(ledger):
    bound = falling_back(lambda *a, **k: Declined("no room"), lambda *a, **k: (a, k))(ledger)
    operand = object()
    args, kwargs = bound(operand, key=operand)
    assert args[0] is operand and kwargs["key"] is operand
    assert (ledger.calls, ledger.fallbacks, ledger.reasons) == (1, 1, ["no room"])


def test_a_decline_with_nothing_to_improve_is_not_counted(ledger):
    assert falling_back(lambda: Declined("fine as it is", counted=False), lambda: 7)(ledger)() == 7
    assert (ledger.calls, ledger.fallbacks) == (1, 0)


def test_an_error_of_the_fast_way_runs_the_original_once_and_is_reported(ledger):
    error, ran = RuntimeError("ours"), []

    def attempt():
        raise error

    assert falling_back(attempt, lambda: ran.append(1) or 7)(ledger)() == 7
    assert ran == [1] and ledger.errors == [error]


def test_when_the_original_raises_too_its_exception_is_the_callers_own(ledger):
    theirs = ValueError("theirs")

    def attempt():
        raise RuntimeError("ours")

    def original():
        raise theirs

    with pytest.raises(ValueError) as raised:
        falling_back(attempt, original)(ledger)()
    assert raised.value is theirs and theirs.__context__ is None and theirs.__cause__ is None
    assert ledger.errors == [] and ledger.calls == 1


def test_an_interrupt_is_not_swallowed(ledger):
    def attempt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        falling_back(attempt, lambda: pytest.fail("the original ran"))(ledger)()


def test_every_export_is_known_by_its_name_and_can_be_called_without_a_ledger():
    assert set(copies.EXPORTS) == {
        "to_device", "snapshot_to_device", "copy_h2d", "cat_to_device", "nested_to_device", "tensor_to_device",
        "rows_to_device", "padded_rows", "call_pinned", "swap_blocks", "swap_tensors", "swap_addresses",
    }  # fmt: skip
    for name, function in copies.EXPORTS.items():
        assert function.name == name and getattr(copies, name) is function
    assert copies.call_pinned(lambda x: x + 1, 1) == 2


def test_importing_copies_imports_neither_torch_nor_patching():
    code = (
        "import sys; sys.modules['torch'] = None; import h2d_patch.copies as c; c.stop();"
        "report = c.start('cuda:0', 1 << 20); assert report.ring_bytes == 0 and report.reasons, report;"
        "bad = [m for m in sys.modules if m.startswith(('numpy', 'triton', 'h2d_patch.patching'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_call_is_counted_by_its_path_or_as_a_fallback(ledger):
    def attempt(path, answer):
        if path:
            note(path, 10)
        if isinstance(answer, Exception):
            raise answer
        return answer

    bound = falling_back(attempt, lambda *_: None)(ledger)
    bound("staging", 7)
    bound("driver batch", Declined("as fast", counted=False))
    bound(None, Declined("nothing to copy", counted=False))
    bound("staging", Declined("full"))
    bound("staging", ValueError())
    bound(None, 7)
    assert ledger.taken == [("staging", 10), ("driver batch", 10), ("original", 0), ("fixed", 0)]
    assert ledger.calls == len(ledger.taken) + ledger.fallbacks == 6
