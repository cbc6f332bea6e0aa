"""Run the original and the fixed form on the same stand-ins and compare every byte.

On the CPU the copy functions are made to go through their staging path over ordinary memory. On a GPU each call is made
under queued work and its sources are overwritten at once: the result must be the values at the moment of the call
(law 1), and the call must not have waited (law 3).
"""

from __future__ import annotations

import ast
import builtins
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..patching.pattern import Pattern
from ..patching.recognise import Replace, Target
from ..patching.rewrite import Rewrite
from ..patching.switch import last_line
from .stand_ins import StandIns

if TYPE_CHECKING:
    import torch

ROUNDS = 3
QUEUED_MS = 10
# A call that waits returns after QUEUED_MS; one that does not, within microseconds. Between the two lies the noise of a
# busy machine, so a call may be slow twice.
WAITED_MS = QUEUED_MS / 2
TRIES = 3
_CYCLES_PER_MS = 1_900_000  # of torch.cuda._sleep, at an H200's clock


class SelfTestFailed(Exception):
    """The fixed form does not do what the original does; the text says how."""


class _Ledger:
    """Counts for a self-test: an error of ours is a failure there, never hidden by the fallback."""

    def __init__(self) -> None:
        self.calls = 0
        self.fallbacks = 0
        self.error: BaseException | None = None

    def took(self, path: str, nbytes: int) -> None:
        pass

    def declined(self, reason: str) -> None:
        self.fallbacks += 1

    def failed(self, error: BaseException) -> None:
        self.error = error


def run(
    target: Target,
    exports: Mapping[str, Any],
    device: torch.device,
    original: Callable[..., Any] | None = None,
    rounds: int = ROUNDS,
) -> float | None:
    """Tests everything that `target` exchanges; returns the milliseconds it took, or None where nothing is given.

    `original` is the release's own function where the target replaces one. Raises SelfTestFailed.
    """
    import torch

    parts: Sequence[Rewrite | Replace] = [target.replace] if target.replace else target.rewrites
    for name in {target.replace.put} if target.replace else {n for part in target.rewrites for n in part.put.called()}:
        _ = exports[name].original  # imports what it needs, before the clock starts
    start = time.perf_counter()
    first = time.time_ns() % (1 << 31)
    tested = False
    for part in parts:
        if not part.given:
            continue
        tested = True
        # Whatever the default device is where a module is being imported, sources lie on the CPU.
        with torch.device("cpu"):
            old, new = _forms(part, exports, original)
            for number in range(rounds):
                _one_round(old, new, part.given, device, first + number)
    return (time.perf_counter() - start) * 1e3 if tested else None


Form = Callable[[StandIns, _Ledger], Any]


def _forms(
    part: Rewrite | Replace, exports: Mapping[str, Any], original: Callable[..., Any] | None
) -> tuple[Form, Form]:
    if isinstance(part, Replace):
        function = exports[part.put]
        old = original or function.original
        return (
            lambda made, _: old(**made.names),
            lambda made, ledger: function.bind(ledger)(**made.names),
        )

    def evaluate(pattern: Pattern, bind: bool) -> Form:
        root = ast.Expression(pattern.expression) if pattern.expression else ast.Module(list(pattern.statements), [])
        try:
            code = compile(ast.fix_missing_locations(root), "<pattern>", "eval" if pattern.expression else "exec")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise SelfTestFailed(f"{pattern.text!r} does not run by itself: {error}") from None

        def form(made: StandIns, ledger: _Ledger) -> Any:
            import torch

            functions = {name: function.bind(ledger) for name, function in exports.items()} if bind else {}
            return eval(code, {"__builtins__": builtins, "torch": torch, **functions, **made.names})

        return form

    return evaluate(part.find, bind=False), evaluate(part.put, bind=True)


def _one_round(old: Form, new: Form, given: tuple[str, ...], device: torch.device, seed: int) -> None:
    import torch

    from .. import copies

    on_cpu = device.type == "cpu"
    try:
        made = StandIns(given, device, seed)
        expected = old(made, _Ledger())
    except Exception as error:
        raise SelfTestFailed(f"the stand-ins in 'given' do not fit 'find': {last_line(error)}") from error
    if not on_cpu:
        torch.cuda.synchronize(device)
    elapsed_ms = 0.0
    for _ in range(TRIES):
        ours = StandIns(given, device, seed)
        ledger = _Ledger()
        if not on_cpu:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(QUEUED_MS * _CYCLES_PER_MS)
        start = time.perf_counter()
        try:
            with copies.forced_staging() if on_cpu else nullcontext():
                result = new(ours, ledger)
        except Exception as error:
            raise SelfTestFailed(f"the fixed form raised {last_line(error)}") from error
        elapsed_ms = (time.perf_counter() - start) * 1e3
        if not on_cpu:
            for source in ours.sources:
                source.view(-1).view(torch.uint8).fill_(0x5A)
            torch.cuda.synchronize(device)
        if ledger.error is not None:
            raise SelfTestFailed(f"a copy function raised {last_line(ledger.error)}")
        if not ledger.calls:
            raise SelfTestFailed("the fixed form calls no copy function, and so mends nothing")
        if difference := _difference(expected, result) or _difference(made.destinations, ours.destinations):
            raise SelfTestFailed(difference)
        if on_cpu or ledger.fallbacks or elapsed_ms < WAITED_MS:
            return
    raise SelfTestFailed(f"a call took {elapsed_ms:.1f} ms with {QUEUED_MS} ms of GPU work queued: it waits")


def _difference(expected: Any, found: Any, where: str = "the result") -> str | None:
    """How `found` differs from `expected`, in words; None if it does not, down to dtype, strides and every byte."""
    import torch

    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{where} is {type(found).__name__}, the original's a tensor"
        for what in ("dtype", "shape", "device"):
            if getattr(expected, what) != getattr(found, what):
                return f"{where} has {what} {getattr(found, what)}, the original's {getattr(expected, what)}"
        # On the CPU the original hands back its source as it is, gaps and all.
        if expected.stride() != found.stride() and expected.numel() and not expected.is_cpu:
            return f"{where} has strides {found.stride()}, the original's {expected.stride()}"
        same = torch.equal(_bytes(expected), _bytes(found))
        return None if same else f"{where} holds other bytes than the original's"
    if type(expected) is not type(found):
        return f"{where} is {type(found).__name__}, the original's {type(expected).__name__}"
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return f"{where} has keys {sorted(found)}, the original's {sorted(expected)}"
        return _first(_difference(expected[key], found[key], f"{where}[{key!r}]") for key in expected)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f"{where} has {len(found)} parts, the original's {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return _first(_difference(one, other, f"{where}[{number}]") for number, (one, other) in pairs)
    return None if expected == found else f"{where} is {found!r}, the original's {expected!r}"


def _first(found: Any) -> str | None:
    return next((text for text in found if text), None)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
