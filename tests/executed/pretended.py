"""What stands in for everything that a function of a release touches, and a record of all that was done with it."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch


class Pretended:
    """An object, a class or a module of which only `given` is known: all else of it is another one.

    A call of one is written to `log`, its tensors as they were at that moment. `own` finds what its class has in the
    release. As a class, it has the objects that list its name in `is_a`.
    """

    def __init__(self, name: str, log: list[Any], own: Callable[[Any, str], Any] | None = None, **given: Any) -> None:
        vars(self).update(_name=name, _log=log, _own=own, **given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = self._own(self, name) if self._own is not None else None
        if own is not None:
            return own
        made = Pretended(f"{self._name}.{name}", self._log)
        vars(self)[name] = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Pretended:
        self._log.append((self._name, frozen(args), frozen(kwargs)))
        return Pretended(f"{self._name}()", self._log)

    def __getitem__(self, key: Any) -> Pretended:
        return Pretended(f"{self._name}[]", self._log)

    def __instancecheck__(self, instance: object) -> bool:
        return self._name.rpartition(".")[2] in getattr(instance, "is_a", ())

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<pretended {self._name}>"


def frozen(value: Any, deep: bool = False, seen: frozenset[int] = frozenset()) -> Any:
    """`value` as it is now, to be compared with `==`: tensors and arrays down to their bytes.

    Of what is pretended the name; with `deep` also what it is known to hold.
    """
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), bytes_of(value))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, enum.Enum)):
        return value
    if id(value) in seen:
        return "itself"
    seen |= {id(value)}
    if isinstance(value, Mapping):
        return {key: frozen(item, deep, seen) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return (type(value).__name__, *(frozen(item, deep, seen) for item in value))
    if isinstance(value, Pretended) and not deep:
        return value._name
    if isinstance(value, (types.FunctionType, types.MethodType)) or not hasattr(value, "__dict__"):
        return getattr(value, "__name__", type(value).__name__)
    held = {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else vars(value)
    known = {name: item for name, item in held.items() if name not in ("_log", "_own")}
    return (type(value).__name__, frozen(known, deep, seen))


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def tensors_in(frozen_value: Any) -> int:
    """How many tensors and arrays with something in them are in what `frozen` gave."""
    if isinstance(frozen_value, Mapping):
        return sum(map(tensors_in, frozen_value.values()))
    if isinstance(frozen_value, tuple):
        if frozen_value[:1] in (("tensor",), ("array",)):
            return int(bool(frozen_value[3]))
        return sum(map(tensors_in, frozen_value))
    return sum(map(tensors_in, frozen_value)) if isinstance(frozen_value, list) else 0
