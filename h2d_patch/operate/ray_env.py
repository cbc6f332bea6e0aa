"""Our variables reach Ray's workers: vLLM copies only those that it knows there, and ours are not among them.

`VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY`, which 0.17.0 brought, is left to the operator: it is part of the key of
vLLM's compile cache, so that a server which gets it compiles its graphs anew.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import wrapt

from ..patching.locate import rebind
from .ray_forms import (
    NAMES_EXCLUDED,
    NAMES_FUNCTION,
    NAMES_KEPT_BACK,
    NAMES_MODULE,
    ON_THE_NODES,
    VALUES_CLASS,
    VALUES_KEPT_BACK,
    VALUES_METHOD,
    VALUES_MODULE,
    ours,
)

MODULES = NAMES_MODULE, VALUES_MODULE

logger = logging.getLogger("vllm.plugins.h2d_patch")


class _Carrying(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Tells what we have wrapped from what others have."""


class Carrier:
    """Adds our variables to those that a loaded vLLM copies to Ray's workers, until it is undone.

    What the operator keeps back (vLLM's `ray_non_carry_over_env_vars.json`) stays back. After an error of ours vLLM
    copies what it would without us, and the log says so once.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._complained = False
        self.renew()

    def renew(self) -> None:
        """In a forked child: a lock that no thread of the parent's holds."""
        self._lock = threading.Lock()

    def module_loaded(self, module: types.ModuleType) -> None:
        """The post-import hook of `MODULES`."""
        if module.__name__ == NAMES_MODULE:
            self._wrap(module, NAMES_FUNCTION, self._names, NAMES_KEPT_BACK)
        elif not hasattr(module, NAMES_FUNCTION):  # from 0.10.0 on it asks the other module
            self._wrap(getattr(module, VALUES_CLASS, None), VALUES_METHOD, self._values, VALUES_KEPT_BACK)

    def _wrap(self, holder: Any, name: str, wrapper: Callable[..., Any], kept_back: str) -> None:
        found: Any = getattr(holder, "__dict__", {}).get(name)
        if not inspect.isroutine(found) or not isinstance(getattr(holder, kept_back, None), set):
            self._complain(f"no {name} with {kept_back} of a form that we know")
            return
        with self._lock:
            if isinstance(found, _Carrying):
                return
            carrying = _Carrying(found, wrapper)
            setattr(holder, name, carrying)
            if isinstance(holder, types.ModuleType):
                rebind(found, carrying)
            self._undo.append(lambda: _take_off(holder, name, carrying, found))

    def undo(self) -> None:
        """Puts each function back under every name."""
        with self._lock:
            while self._undo:
                self._undo.pop()()

    def _names(self, wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = wrapped(*args, **kwargs)
        try:
            given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
            kept_back = getattr(sys.modules[NAMES_MODULE], NAMES_KEPT_BACK) | (given.get(NAMES_EXCLUDED) or set())
            return found | (ours(os.environ) - kept_back)
        except Exception as error:
            self._complain(error)
            return found

    def _values(self, wrapped: Callable[..., Any], own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = wrapped(*args, **kwargs)
        try:
            carried = {name: os.environ[name] for name in ours(os.environ) - getattr(own, VALUES_KEPT_BACK)}
            return [{**carried, **each} for each in found]
        except Exception as error:
            self._complain(error)
            return found

    def _complain(self, why: object) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("h2d_patch: our variables do not reach Ray's workers: %s; %s", why, ON_THE_NODES)


def _take_off(holder: Any, name: str, carrying: Any, found: Any) -> None:
    if vars(holder).get(name) is carrying:
        setattr(holder, name, found)
    if isinstance(holder, types.ModuleType):  # whoever bound the name while we were in
        rebind(carrying, found)
