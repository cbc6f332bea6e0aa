"""A vLLM platform plugin for the live tests of h2d_patch: the CPU platform, with what its workers need under Ray.

vLLM on the CPU names no Ray resource, so that its Ray executors refuse to start. Ray itself counts as GPUs what
`ray start --num-gpus` says, and hands their numbers out. Chosen where H2D_RAY_PLATFORM is set, in Ray's own processes
too: they ask before any variable of the server's has reached them.
"""

from __future__ import annotations

import os


def chosen() -> str | None:
    return "h2d_ray_cpu.RayCpuPlatform" if os.environ.get("H2D_RAY_PLATFORM") else None
