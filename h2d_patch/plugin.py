"""`register()`: the entry point that vLLM calls in every process, possibly several times in one.

With `H2D_PATCH` unset or 0 it returns at once, having imported nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """Puts the selected fixes in as their modules are loaded. Raises only under `H2D_PATCH_STRICT=1`."""
    if os.environ.get("H2D_PATCH", "").strip() in ("", "0"):
        return
    try:
        from . import process
    except Exception as error:  # a dependency that `pip install --no-deps` left out
        import logging

        logging.getLogger("vllm.plugins.h2d_patch").error("h2d_patch: nothing is patched: %s", error)
        if os.environ.get("H2D_PATCH_STRICT", "").strip() == "1":
            raise
        return
    process.start()
