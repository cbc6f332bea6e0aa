"""A self-test passes what does the same and catches what does not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from h2d_patch import copies  # noqa: E402
from h2d_patch.copies.call import falling_back  # noqa: E402
from h2d_patch.manifest import load  # noqa: E402
from h2d_patch.patching.pattern import parse_put  # noqa: E402
from h2d_patch.patching.recognise import Target  # noqa: E402
from h2d_patch.selftest.compare import SelfTestFailed, run  # noqa: E402
from h2d_patch.selftest.stand_ins import GivenError, StandIns, parse  # noqa: E402

CPU = torch.device("cpu")
TARGETS = {f"{number} {fix.id} {target.function}": target for number, (fix, target) in enumerate(load().targets())}
TO_DEVICE = next(target for name, target in TARGETS.items() if "rotary_pos_emb_thw" in name)
MROPE = next(target for name, target in TARGETS.items() if "_prepare_inputs" in name)
NESTED = next(target for name, target in TARGETS.items() if "_nested_tensors_h2d" in name)


class Export:
    """A copy function whose fast way is `attempt`."""

    def __init__(self, name: str, attempt: Any) -> None:
        self.original = copies.EXPORTS[name].original
        self.bind = falling_back(attempt, self.original)


def with_wrong(name: str, attempt: Any) -> dict[str, Any]:
    return {**copies.EXPORTS, name: Export(name, attempt)}


@pytest.mark.parametrize("name", TARGETS)
def test_every_shipped_target_passes_within_100_ms(name: str) -> None:
    run(TARGETS[name], copies.EXPORTS, CPU)  # the first run imports
    took = min(run(TARGETS[name], copies.EXPORTS, CPU) or 1e9 for _ in range(3))
    assert took < 100


def test_no_self_test_starts_threads_which_a_process_that_forks_must_not_have() -> None:
    code = (
        "import os, torch; from h2d_patch import copies; from h2d_patch.manifest import load;"
        "from h2d_patch.selftest.compare import run; torch.set_num_threads(4);"
        "threads = lambda: len(os.listdir('/proc/self/task'));"
        "targets = [target for _, target in load().targets()];"
        "run(targets[0], copies.EXPORTS, torch.device('cpu')); before = threads();"
        "started = [t.function for t in targets for _ in range(3)"
        " if run(t, copies.EXPORTS, torch.device('cpu')) and threads() != before];"
        "assert not started, started[0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda src, dev: src + 1, "holds other bytes"),
        (lambda src, dev: src.to(torch.float64), "dtype"),
        (lambda src, dev: src[:0], "shape"),
        (lambda src, dev: None, "is NoneType, the original's a tensor"),
        (lambda src, dev: src.fill_(7), "holds other bytes"),
        (lambda src, dev: 1 / 0, "a copy function raised ZeroDivisionError"),
    ],
)
def test_a_wrong_result_or_an_error_fails_the_self_test(attempt: Any, says: str) -> None:
    with pytest.raises(SelfTestFailed, match=says):
        run(TO_DEVICE, with_wrong("to_device", attempt), CPU)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda dst, src, **_: dst,
        lambda dst, src, **_: dst.copy_(src).add_(1),
        lambda dst, src, **_: dst[:, 1:].copy_(src[:, 1:]),
    ],
)
def test_a_destination_that_was_not_filled_fails_the_self_test(attempt: Any) -> None:
    with pytest.raises(SelfTestFailed):
        run(MROPE, with_wrong("copy_h2d", attempt), CPU)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: {**out, "small": []},
        lambda out: {**out, "layouts": list(out["layouts"])},
        lambda out: {**out, "other": [None, 7, "grid", 2.5, []]},
        lambda out: {key: out[key] for key in list(out)[1:]},
    ],
)
def test_a_replacement_that_loses_structure_fails_the_self_test(spoil: Any) -> None:
    def attempt(tensors: Any, device: Any) -> Any:
        return spoil(copies.nested_to_device(tensors, device))

    with pytest.raises(SelfTestFailed):
        run(NESTED, with_wrong("nested_to_device", attempt), CPU)


def test_a_replacement_is_compared_with_the_release_s_own_function() -> None:
    with pytest.raises(SelfTestFailed):
        run(NESTED, copies.EXPORTS, CPU, original=lambda tensors, device: [])


@pytest.mark.parametrize("put", ["SRC[:]", "to_device(SRC, DEV) if 0 else SRC"])
def test_a_fixed_form_that_calls_no_copy_function_fails_the_self_test(put: str) -> None:
    (part,) = TO_DEVICE.rewrites
    exchanged = dataclasses.replace(part, put=parse_put(put, part.find, copies.EXPORTS))
    with pytest.raises(SelfTestFailed, match="calls no copy function"):
        run(dataclasses.replace(TO_DEVICE, rewrites=(exchanged,)), copies.EXPORTS, CPU)


def test_a_target_without_stand_ins_is_not_tested() -> None:
    bare = Target(
        TO_DEVICE.function,
        TO_DEVICE.releases,
        rewrites=tuple(type(r)(r.find, r.put, r.times) for r in TO_DEVICE.rewrites),
    )
    assert run(bare, copies.EXPORTS, CPU) is None


def test_the_same_seed_makes_the_same_values_in_other_memory() -> None:
    one, other = (StandIns(("a.b = tensor(4, 5)", "n = size(1, 9)", "c = tensor(n)"), CPU, 3) for _ in range(2))
    assert torch.equal(one.names["a"].b, other.names["a"].b) and one.names["n"] == other.names["n"]
    assert one.names["a"].b.data_ptr() != other.names["a"].b.data_ptr()


@pytest.mark.parametrize(
    "line",
    ["x", "x == 1", "x, y = 1, 2", "x = open('f')", "x = (lambda: 1)()", "f(x) = 1", "x = [a for a in b]", "x = a[0]"],
)
def test_what_is_no_stand_in_is_refused(line: str) -> None:
    with pytest.raises(GivenError):
        parse(line)


def one_block_short(name: str) -> Any:
    """The swap `name` without the block that stands last in its batch or mapping."""
    original = copies.EXPORTS[name].original

    def attempt(function: Any, *operands: Any, **more: Any) -> Any:
        if name == "swap_blocks":
            return original(function, *(column[:-1] for column in operands[:3]), *operands[3:], **more)
        if name == "swap_tensors":
            return original(function, *operands[:2], operands[2][:-1], **more)
        params, *columns, count = operands[:5]
        return original(function, params, *(column[:-1] for column in columns), count - 1, *operands[5:])

    return attempt


SWAPS = {name: target for name, target in TARGETS.items() if "kv-swap" in name}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swap_that_leaves_out_a_block_fails_the_self_test(name: str) -> None:
    (put,) = {name for rewrite in SWAPS[name].rewrites for name in rewrite.put.called()}
    with pytest.raises(SelfTestFailed, match="holds other bytes"):
        run(SWAPS[name], with_wrong(put, one_block_short(put)), CPU)
