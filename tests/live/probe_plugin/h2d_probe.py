"""A vLLM plugin for the live tests of h2d_patch. It does nothing unless one of its variables is set.

H2D_PROBE_START_METHOD=fork: vLLM on the CPU always spawns its processes; this lets them be forked, as on a GPU.
H2D_PROBE_FILE=PATH: once that file exists, the copy functions do what it says, in each process that reads it:
    corrupt NAME       what `copies.EXPORTS[NAME]` copied is changed
    raise-once NAME    the next call of `copies.EXPORTS[NAME]` raises inside its attempt, one time in each process
"""

from __future__ import annotations

import os
from pathlib import Path

RAISED = "raised on purpose by h2d_probe"


def register() -> None:
    method = os.environ.get("H2D_PROBE_START_METHOD")
    if method:
        let_start_method(method)
    orders = os.environ.get("H2D_PROBE_FILE")
    if orders and os.environ.get("H2D_PATCH"):
        obey(Path(orders))


def let_start_method(method: str) -> None:
    """Put VLLM_WORKER_MULTIPROC_METHOD back after the CPU platform has set it to spawn."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def obey(orders: Path) -> None:
    """Put ourselves around the attempt of every copy function, also of those that a fix has bound already."""
    import importlib

    from h2d_patch.copies import EXPORTS

    for name, function in EXPORTS.items():
        module = importlib.import_module(function._module)
        binder = module.bind_leaf if name == "nested_to_device" else module.BINDERS[name]
        cells = dict(zip(binder.__code__.co_freevars, binder.__closure__ or (), strict=True))
        if "attempt" in cells:  # else it is made of those that have one
            attempt, original = cells["attempt"], cells["original"]
            attempt.cell_contents = disturbed(name, attempt.cell_contents, original.cell_contents, orders)


def disturbed(name, attempt, original, orders: Path):
    """`attempt`, doing what the file says. Where it declines, as on the CPU, the result of `original` is corrupted."""
    from h2d_patch.copies import Declined

    raised = []

    def disturbed_attempt(*args, **kwargs):
        order = orders.read_text() if orders.exists() else ""
        if order == f"raise-once {name}" and not raised:
            raised.append(True)
            raise RuntimeError(RAISED)
        result = attempt(*args, **kwargs)
        if order == f"corrupt {name}":
            if type(result) is Declined:
                result = original(*args, **kwargs)
            turn_around(result)
        return result

    return disturbed_attempt


def turn_around(value) -> None:
    """Reverse each tensor's first dimension in place: patches, positions and the axes of M-RoPE, all still in range."""
    if hasattr(value, "flip"):
        if value.dim():
            value.copy_(value.flip(0))
    elif isinstance(value, dict):
        turn_around(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            turn_around(item)
