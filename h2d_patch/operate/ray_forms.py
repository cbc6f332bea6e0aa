"""What copies variables to Ray's processes, by the names that releases have for it, and which variables are ours.

Read off the sources of every release from 0.8.0 to 0.33.0 (docs/many.md):
- 0.8.0 to 0.9.2: the executor asks its own `_get_env_vars_to_be_updated` what each worker gets.
- 0.10.0 on: `get_env_vars_to_copy` names them, for workers up to 0.32.0 and for the engine cores of data parallelism.
- 0.20.0 on, by default from 0.21.0: `RayExecutorV2` copies the driver's whole environment, which needs no help.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping

NAMES_MODULE, NAMES_FUNCTION, NAMES_EXCLUDED = "vllm.ray.ray_env", "get_env_vars_to_copy", "exclude_vars"
NAMES_KEPT_BACK = "RAY_NON_CARRY_OVER_ENV_VARS"
VALUES_MODULE, VALUES_CLASS = "vllm.executor.ray_distributed_executor", "RayDistributedExecutor"
VALUES_METHOD, VALUES_KEPT_BACK = "_get_env_vars_to_be_updated", "non_carry_over_env_vars"
ENGINE_MODULE, LOADS_PLUGINS = "vllm.v1.engine.core", "load_general_plugins"
# Where the engine cores of data parallelism are made into Ray's actors, from 0.9.1 on.
ENGINES_MODULES, ENGINES_CLASS = ("vllm.v1.engine.utils", "vllm.v1.utils"), "CoreEngineActorManager"
# The file, in vLLM's configuration directory, of variables that the operator keeps back.
KEPT_BACK_FILE = "ray_non_carry_over_env_vars.json"

ON_THE_NODES = "set H2D_PATCH where Ray is started, on each node: H2D_PATCH=1 ray start …"
_PREFIX = "H2D_PATCH"
# Files that a process with another working directory must find too.
PATHS = "H2D_PATCH_MANIFEST", "H2D_PATCH_PROFILE", "H2D_PATCH_RUN_DIR"


def ours(names: Iterable[str]) -> set[str]:
    """Those of the names that are our variables'."""
    return {name for name in names if name == _PREFIX or name.startswith(f"{_PREFIX}_")}


def make_absolute(environ: MutableMapping[str, str]) -> None:
    """Paths relative to this process's directory, made absolute: Ray's workers have another. `~` is each host's own."""
    for name in PATHS:
        value = environ.get(name, "").strip()
        if value and not value.startswith(("/", "~")):
            environ[name] = os.path.abspath(value)
