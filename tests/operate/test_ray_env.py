"""Our variables among those that vLLM copies to Ray's workers: each release's own code asked, with ours around it."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_server import Server

from h2d_patch.operate import ray_env
from h2d_patch.operate import ray_forms as forms
from h2d_patch.operate.ray_advice import advice
from h2d_patch.releases import shipped
from h2d_patch.report.check import Installed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import cache, fetch

OURS = {"H2D_PATCH": "1", "H2D_PATCH_SERVER": "a-server", "H2D_PATCH_MANIFEST": "/srv/own.toml"}
# The first and the last of each form; of the others, those that are in the cache.
FORMS = ["0.8.0", "0.8.2", "0.9.1", "0.9.2", "0.10.0", "0.11.1", "0.16.0", "0.17.0", "0.22.1", "0.29.0", "0.33.0"]
RELEASES = sorted(
    {*FORMS, *(release for release in map(str, shipped().known) if (cache() / f"vllm-{release}").is_dir())},
    key=lambda release: [int(part) for part in release.replace(".post", ".").split(".")],
)
OLD_EXECUTOR = forms.VALUES_MODULE.replace(".", "/") + ".py"
EXECUTORS = OLD_EXECUTOR, "vllm/v1/executor/ray_executor.py"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("H2D_", "VLLM_"))]:
        monkeypatch.delenv(name)
    for name, value in {**OURS, "H2D_PATCHED": "another's", "VLLM_PLUGINS": "h2d_patch"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def the_installed_vllm_comes_back() -> Iterator[None]:
    """Whatever a release's modules have imported of their own."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(before)


class Vllm:
    """`vllm` from a release's sources, with only what the modules asked for here need of the rest."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            patch.delitem(sys.modules, name)
        for name in ("vllm", "vllm.ray", "vllm.v1", "vllm.v1.executor", "vllm.executor"):
            package = types.ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            patch.setitem(sys.modules, name, package)
        logger = types.ModuleType("vllm.logger")
        logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "vllm.logger", logger)
        self.patch = patch

    def has(self, name: str) -> bool:
        return (self.folder / (name.replace(".", "/") + ".py")).is_file()

    def module(self, name: str) -> types.ModuleType:
        self.patch.setitem(sys.modules, name, types.ModuleType(name))  # so that it is taken out again
        del sys.modules[name]
        return importlib.import_module(name)

    def old_executor(self) -> types.ModuleType:
        """The module up to 0.9.2 with nothing in it but what says what each worker gets."""
        tree = ast.parse((self.folder / OLD_EXECUTOR).read_bytes())
        (kind,) = (node for node in tree.body if getattr(node, "name", "") == forms.VALUES_CLASS)
        assert isinstance(kind, ast.ClassDef)
        kind.bases = []
        kind.body = [
            node
            for node in kind.body
            if isinstance(node, ast.Assign | ast.If) or getattr(node, "name", "") == forms.VALUES_METHOD
        ]
        module = types.ModuleType(forms.VALUES_MODULE)
        vars(module).update(os=os, json=json, envs=self.module("vllm.envs"))
        exec(compile(ast.Module([kind], []), OLD_EXECUTOR, "exec"), vars(module))
        self.patch.setitem(sys.modules, module.__name__, module)
        return module


@pytest.fixture
def carrier() -> Iterator[ray_env.Carrier]:
    carrier = ray_env.Carrier()
    yield carrier
    carrier.undo()


def names_of(vllm: Vllm) -> types.ModuleType:
    return vllm.module(forms.NAMES_MODULE)


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_ours_are_among_the_copied_of_every_release(
    release: str, monkeypatch: pytest.MonkeyPatch, carrier: ray_env.Carrier
) -> None:
    vllm = Vllm(fetch(release), monkeypatch)
    if vllm.has(forms.NAMES_MODULE):
        module = names_of(vllm)
        original = module.get_env_vars_to_copy
        user = types.ModuleType("vllm.v1.engine.utils")
        user.get_env_vars_to_copy = original  # type: ignore[attr-defined]  # bound before we came
        monkeypatch.setitem(sys.modules, user.__name__, user)
        assert not set(OURS) & original()
        carrier.module_loaded(module)
        assert set(OURS) | {"VLLM_PLUGINS"} <= user.get_env_vars_to_copy(destination="workers")
        assert "H2D_PATCHED" not in module.get_env_vars_to_copy()
        assert not {"H2D_PATCH", "VLLM_PLUGINS"} & module.get_env_vars_to_copy({"H2D_PATCH", "VLLM_PLUGINS"})
        assert "H2D_PATCH" not in module.get_env_vars_to_copy(exclude_vars={"H2D_PATCH"}, additional_vars={"X"})
        carrier.undo()
        assert module.get_env_vars_to_copy is user.get_env_vars_to_copy is original
    else:
        module = vllm.old_executor()
        kind = module.RayDistributedExecutor
        original = vars(kind)[forms.VALUES_METHOD]
        executor = kind()
        executor._env_vars_for_all_workers = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
        carrier.module_loaded(module)
        found = executor._get_env_vars_to_be_updated()
        assert found == [{**OURS, "CUDA_VISIBLE_DEVICES": rank} for rank in ("0", "1")]
        carrier.undo()
        assert vars(kind)[forms.VALUES_METHOD] is original
        assert "VLLM_PLUGINS" in vllm.module("vllm.envs").environment_variables


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_workers_have_the_variables_before_they_load_plugins(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the older executor: `update_environment_variables` goes out before `init_worker`, which loads the plugins."""
    folder = fetch(release)
    found = [path for path in EXECUTORS if (folder / path).is_file() and VALUES in (folder / path).read_text()]
    for path in found:
        tree = ast.parse((folder / path).read_bytes())
        (init,) = (node for node in ast.walk(tree) if getattr(node, "name", "") == "_init_workers_ray")
        sent = {
            node.value: node.lineno
            for node in ast.walk(init)
            if isinstance(node, ast.Constant) and node.value in ("update_environment_variables", "init_worker")
        }
        asked = [node for node in ast.walk(init) if getattr(node, "attr", "") == forms.VALUES_METHOD]
        assert len(asked) == 1
        assert abs(asked[0].lineno - sent["update_environment_variables"]) <= 1
        assert sent["update_environment_variables"] < sent["init_worker"]
    vllm = Vllm(folder, monkeypatch)
    if vllm.has("vllm.v1.executor.ray_env_utils"):  # the newer one: everything, before the worker is made
        names_of(vllm)
        copied = vllm.module("vllm.v1.executor.ray_env_utils").get_driver_env_vars(worker_specific_vars={"LOCAL_RANK"})
        assert OURS.items() <= copied.items()
        assert copied["VLLM_PLUGINS"] == "h2d_patch"
        found.append("vllm/v1/executor/ray_executor_v2.py")
    assert found


VALUES = f"self.{forms.VALUES_METHOD}()"


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.9.2", "0.10.0", "0.22.1"])
def test_what_the_operator_keeps_back_stays_back(
    release: str, monkeypatch: pytest.MonkeyPatch, carrier: ray_env.Carrier, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CONFIG_ROOT", str(tmp_path))
    (tmp_path / "ray_non_carry_over_env_vars.json").write_text('["H2D_PATCH_MANIFEST", "H2D_PATCH", "PATH"]')
    vllm = Vllm(fetch(release), monkeypatch)
    if vllm.has(forms.NAMES_MODULE):
        module = names_of(vllm)
        carrier.module_loaded(module)
        copied = module.get_env_vars_to_copy()
    else:
        module = vllm.old_executor()
        carrier.module_loaded(module)
        executor = module.RayDistributedExecutor()
        executor._env_vars_for_all_workers = [{}]
        (copied,) = executor._get_env_vars_to_be_updated()
    assert {name for name in copied if name.startswith("H2D")} == {"H2D_PATCH_SERVER"}
    said = advice({"VLLM_CONFIG_ROOT": str(tmp_path)}, Installed(fetch(release)))[-1]
    assert f"{tmp_path}/ray_non_carry_over_env_vars.json keeps H2D_PATCH, H2D_PATCH_MANIFEST from" in said.why


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_operator_is_told_where_they_do_not_reach_and_nowhere_else(release: str, tmp_path: Path) -> None:
    said = advice({"VLLM_CONFIG_ROOT": str(tmp_path)}, Installed(fetch(release)))
    expected = {"0.8": "the engine core of `vllm serve`", "0.9.1": "data-parallel", "0.9.2": "data-parallel"}
    wanted = [text for known, text in expected.items() if release.startswith(known)]
    assert len(said) == len(wanted)
    for text, one in zip(wanted, said, strict=True):
        assert text in one.why
        assert "H2D_PATCH=1 ray start" in one.do


@pytest.mark.releases
@pytest.mark.parametrize("change", ["renamed", "no such set"])
def test_a_form_that_nobody_knows_is_left_alone_and_said(
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    carrier: ray_env.Carrier,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    source = (fetch("0.22.1") / "vllm/ray/ray_env.py").read_text()
    old, new = {
        "renamed": ("get_env_vars_to_copy", "names_to_copy"),
        "no such set": ("RAY_NON_CARRY_OVER_ENV_VARS", "KEPT_BACK"),
    }[change]
    place = tmp_path / "vllm"
    (place / "ray").mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "ray/ray_env.py").write_text(source.replace(old, new))
    (place / "envs.py").write_text((fetch("0.22.1") / "vllm/envs.py").read_text())
    module = names_of(Vllm(tmp_path, monkeypatch))
    before = dict(vars(module))
    for _ in range(2):
        carrier.module_loaded(module)
    assert vars(module) == before
    (record,) = caplog.records
    assert "H2D_PATCH=1 ray start" in record.getMessage()
    (said,) = advice({"VLLM_CONFIG_ROOT": str(tmp_path)}, Installed(tmp_path))
    assert "in a way that we do not know" in said.why


@pytest.mark.releases
def test_an_error_of_ours_leaves_what_vllm_copies(
    monkeypatch: pytest.MonkeyPatch, carrier: ray_env.Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    module = names_of(Vllm(fetch("0.22.1"), monkeypatch))
    expected = module.get_env_vars_to_copy()
    carrier.module_loaded(module)
    monkeypatch.setattr(module, "RAY_NON_CARRY_OVER_ENV_VARS", None)
    monkeypatch.setattr(ray_env, "ours", lambda _: 1 // 0)
    with pytest.raises(TypeError):  # vLLM's own, untouched
        module.get_env_vars_to_copy()
    monkeypatch.setattr(module, "RAY_NON_CARRY_OVER_ENV_VARS", set())
    assert module.get_env_vars_to_copy() == module.get_env_vars_to_copy() == expected
    assert len([record for record in caplog.records if "division" in record.getMessage()]) == 1


@pytest.mark.releases
def test_twice_loaded_is_wrapped_once(monkeypatch: pytest.MonkeyPatch, carrier: ray_env.Carrier) -> None:
    module = names_of(Vllm(fetch("0.22.1"), monkeypatch))
    original = module.get_env_vars_to_copy
    carrier.module_loaded(module)
    ray_env.Carrier().module_loaded(module)
    carrier.undo()
    assert module.get_env_vars_to_copy is original


def test_paths_are_made_absolute_and_others_left() -> None:
    environ = {
        "H2D_PATCH_MANIFEST": "own.toml",
        "H2D_PATCH_PROFILE": "~/profile.json",
        "H2D_PATCH_RUN_DIR": "/run/h2d",
        "H2D_PATCH": "a,b",
    }
    forms.make_absolute(environ)
    assert environ == {
        "H2D_PATCH_MANIFEST": str(Path.cwd() / "own.toml"),
        "H2D_PATCH_PROFILE": "~/profile.json",
        "H2D_PATCH_RUN_DIR": "/run/h2d",
        "H2D_PATCH": "a,b",
    }


RAY_ENV = """
import os
RAY_NON_CARRY_OVER_ENV_VARS = set()

def get_env_vars_to_copy(exclude_vars=None, additional_vars=None, destination=None):
    return {"VLLM_PLUGINS"}
"""
ASKED = """
    register()
    from vllm.ray.ray_env import get_env_vars_to_copy
    original = getattr(get_env_vars_to_copy, "__wrapped__", get_env_vars_to_copy)
    print(json.dumps(sorted(get_env_vars_to_copy())))
"""


@pytest.fixture
def with_ray(server: Server) -> Server:
    package = server.path / "vllm/ray"
    package.mkdir(parents=True)
    (server.path / "vllm/__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "ray_env.py").write_text(RAY_ENV)
    return server


def test_a_process_with_fixes_carries_them_until_it_is_undone_a_forked_one_too(with_ray: Server) -> None:
    script = f"""
    os.chdir({str(with_ray.path)!r})
    {ASKED}
    print(os.environ["H2D_PATCH_MANIFEST"])
    if not os.fork():
        print(json.dumps(sorted(get_env_vars_to_copy())), flush=True)
        os._exit(0)
    os.wait()
    from h2d_patch import process
    from vllm.ray import ray_env
    process.current.undo()
    print(ray_env.get_env_vars_to_copy is get_env_vars_to_copy is original)
    """
    first, manifest, forked, undone = with_ray.run(script, H2D_PATCH_MANIFEST="ours.toml").stdout.splitlines()
    assert manifest == str(with_ray.path / "ours.toml")
    carried = ["H2D_PATCH", "H2D_PATCH_MANIFEST", "H2D_PATCH_RUN_DIR", "H2D_PATCH_SERVER", "VLLM_PLUGINS"]
    assert json.loads(first) == json.loads(forked) == carried
    assert undone == "True"


def test_a_module_that_is_imported_already_is_hooked_where_others_have_bound_the_name(with_ray: Server) -> None:
    script = f"""
    import types
    user = sys.modules["user"] = types.ModuleType("user")
    from vllm.ray.ray_env import get_env_vars_to_copy as early
    user.copied = early
    {ASKED}
    print("H2D_PATCH" in user.copied())
    """
    assert with_ray.run(script).stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("value", ["0", ""])
def test_with_nothing_enabled_nothing_is_carried_or_set(value: str, with_ray: Server) -> None:
    script = ASKED + "    print([name for name in os.environ if 'RAY' in name or name == 'H2D_PATCH_SERVER'])\n"
    copied, set_ones = with_ray.run(script, H2D_PATCH=value).stdout.splitlines()
    assert json.loads(copied) == ["VLLM_PLUGINS"]
    assert set_ones == "[]"
