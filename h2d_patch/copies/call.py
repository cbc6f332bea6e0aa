"""The bound call: try the fast way; where it declines or breaks, run the original expression."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, final

Binder = Callable[["Ledger"], Callable[..., Any]]

# Paths, and their bytes, of calls whose attempt has noted none.
ORIGINAL: Final = "original"
UNNAMED: Final = ("fixed", 0)
LEFT: Final = (ORIGINAL, 0)


class Ledger(Protocol):
    """Where a bound function writes what it did."""

    calls: int
    fallbacks: int

    def took(self, path: str, nbytes: int) -> None:
        """`nbytes` were copied by `path`; 0 by `ORIGINAL`, where there was nothing to improve."""

    def declined(self, reason: str) -> None:
        """The original ran in place of the fast way, for a reason known beforehand. Counts the fallback."""

    def failed(self, error: BaseException) -> None:
        """The fast way raised `error`; the original ran in its place and succeeded."""


@final
class Declined:
    """Why the fast way left a call to the original.

    `counted` is false where there is nothing to improve: no CPU source, no CUDA destination, nothing to copy, or a copy
    that is asynchronous already.
    """

    __slots__ = ("counted", "reason")

    def __init__(self, reason: str, counted: bool = True) -> None:
        self.reason: Final = reason
        self.counted: Final = counted

    def __repr__(self) -> str:
        return f"Declined({self.reason!r}, counted={self.counted})"


class _Noted(threading.local):
    path: tuple[str, int] | None = None


_noted: Final = _Noted()


def note(path: str, nbytes: int) -> None:
    """For the ledger of the call that runs in this thread: `nbytes` have been copied by `path`. The last one counts."""
    _noted.path = path, nbytes


class CopyFunction:
    """One function that a fix may call, with the expression it stands in for.

    Its code is in `h2d_patch.copies.<module>`, which needs torch and is imported at the first bind or call.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name: Final = name
        self._module = f"{__package__}.{module}"
        self._unledgered: Callable[..., Any] | None = None

    def bind(self, ledger: Ledger) -> Callable[..., Any]:
        """The function, writing into `ledger`. Raises ImportError without torch."""
        binder: Binder = importlib.import_module(self._module).BINDERS[self.name]
        bound = binder(ledger)
        bound.__name__ = bound.__qualname__ = self.name
        return bound

    @property
    def original(self) -> Callable[..., Any]:
        """What it stands in for, as a function of the same operands. Raises ImportError without torch."""
        found: Callable[..., Any] = importlib.import_module(self._module).ORIGINALS[self.name]
        return found

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function, writing nowhere."""
        if self._unledgered is None:
            self._unledgered = self.bind(_Nowhere())
        return self._unledgered(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<CopyFunction {self.name}>"


class _Nowhere:
    calls = 0
    fallbacks = 0

    def took(self, path: str, nbytes: int) -> None:
        pass

    def declined(self, reason: str) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        pass


def falling_back(attempt: Callable[..., Any], original: Callable[..., Any]) -> Binder:
    """Join a fast way to its original.

    `attempt` returns the result, or a `Declined` before it has done anything that `original` would not do again alike.
    """

    def bind(ledger: Ledger) -> Callable[..., Any]:
        def bound(*args: Any, **kwargs: Any) -> Any:
            ledger.calls += 1
            _noted.path = failure = None
            try:
                result = attempt(*args, **kwargs)
            except Exception as error:
                failure = error
            else:
                if type(result) is not Declined:
                    ledger.took(*(_noted.path or UNNAMED))
                    return result
                if result.counted:
                    ledger.declined(result.reason)
                else:
                    ledger.took(*(_noted.path or LEFT))
            if failure is None:
                return original(*args, **kwargs)
            # Not in the except block: an exception of the original must reach the caller as if we were not here.
            try:
                result = original(*args, **kwargs)
                ledger.failed(failure)
                return result
            finally:
                del failure  # its traceback holds this frame, and so the caller's tensors

        return bound

    return bind
