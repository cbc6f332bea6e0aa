"""How far a measurement is, on stderr where that is a terminal."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

_EVERY_S: Final = 5.0


class Progress(AbstractContextManager["Progress"]):
    """Called with how much is done of how much: a bar where rich is there, else a line every few seconds."""

    def __init__(self, what: str) -> None:
        self._what: Final = what
        self._stack: Final = ExitStack()
        self._bar: Any = None
        self._task: Any = None
        self._shown = time.monotonic()
        self._on: Final = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._on:
            try:
                from rich.console import Console
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            self._bar = self._stack.enter_context(Bar(console=Console(stderr=True), transient=True))
            self._task = self._bar.add_task(self._what, total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __call__(self, done: int, of: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of)
        elif self._on and time.monotonic() - self._shown > _EVERY_S:
            self._shown = time.monotonic()
            print(f"{self._what}: {done} of {of}", file=sys.stderr, flush=True)
