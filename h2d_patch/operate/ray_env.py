"""Our variables reach Ray's workers: vLLM copies only those that it knows there, and ours are not among them.

What copies them, read off the sources of every release from 0.8.0 to 0.33.0 (docs/many.md):
- 0.8.0 to 0.9.2: the executor asks its own `_get_env_vars_to_be_updated` what each worker gets.
- 0.10.0 on: `get_env_vars_to_copy` names them, for workers up to 0.32.0 and for the engine cores of data parallelism.
- 0.20.0 on, by default from 0.21.0: `RayExecutorV2` copies the driver's whole environment, which needs no help.

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
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import wrapt

from ..patching.locate import rebind

PREFIX = "H2D_PATCH"
NAMES_MODULE, NAMES_FUNCTION, NAMES_EXCLUDED = "vllm.ray.ray_env", "get_env_vars_to_copy", "exclude_vars"
NAMES_KEPT_BACK = "RAY_NON_CARRY_OVER_ENV_VARS"
VALUES_MODULE, VALUES_CLASS = "vllm.executor.ray_distributed_executor", "RayDistributedExecutor"
VALUES_METHOD, VALUES_KEPT_BACK = "_get_env_vars_to_be_updated", "non_carry_over_env_vars"
MODULES = NAMES_MODULE, VALUES_MODULE
# Files that a process with another working directory must find too.
PATHS = "H2D_PATCH_MANIFEST", "H2D_PATCH_PROFILE", "H2D_PATCH_RUN_DIR"
ON_THE_NODES = "set H2D_PATCH where Ray is started, on each node: H2D_PATCH=1 ray start …"

logger = logging.getLogger("vllm.plugins.h2d_patch")


def ours(environ: Mapping[str, str]) -> set[str]:
    """The names of our variables among those."""
    return {name for name in environ if name == PREFIX or name.startswith(f"{PREFIX}_")}


def make_absolute(environ: MutableMapping[str, str]) -> None:
    """Paths relative to this process's directory, made absolute: Ray's workers have another. `~` is each host's own."""
    for name in PATHS:
        value = environ.get(name, "").strip()
        if value and not value.startswith(("/", "~")):
            environ[name] = os.path.abspath(value)


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
