"""A process from `register()` to verdicts: what is put in when, what failures do, and what children inherit.

The models here are stand-ins with a manifest of their own; real vLLM is in tests/live.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from typing import Any

import pytest
from model_server import MANIFEST, MODEL, Server

CALL = """
register()
import our_model
from h2d_patch import process
model = our_model.Model()
print(model.forward(torch.ones(3)).tolist())
print(json.dumps(process.current.state()["targets"][-2]) if process.current else "inert")
"""


def target(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_module_imported_after_register_is_patched_and_its_calls_are_counted(server: Server) -> None:
    found = target(server.run(CALL))
    assert (found["verdict"], found["calls"], found["fallbacks"]) == ("active", 1, 0)
    assert (found["bytes"], found["paths"]) == (0, {"original": 1})  # to the CPU there is nothing to better
    assert (found["arms"]["on"]["count"], found["arms"]["off"]["count"]) == (1, 0)
    assert 0 < found["selftest_ms"] < 100


def test_a_module_imported_before_register_is_patched_at_once(server: Server) -> None:
    assert target(server.run("import our_model\n" + CALL))["verdict"] == "active"


def test_a_control_file_that_cannot_be_taken_keeps_no_fix_out(server: Server) -> None:
    broken = "from h2d_patch import process\nprocess.control.signature = lambda *_: 1 / 0\n"
    done = server.run(broken + CALL)
    assert target(done)["verdict"] == "active"
    assert "reading the control file failed" in done.stderr


def test_registering_twice_patches_once(server: Server) -> None:
    found = target(server.run("register()\nregister()\n" + CALL + "register()\n"))
    assert (found["verdict"], found["calls"]) == ("active", 1)


def test_registering_again_changes_nothing_in_the_process_or_in_a_child_of_it(server: Server) -> None:
    script = """
    import threading, h2d_patch.process
    def look():
        process = h2d_patch.process.current
        finders = [type(finder).__name__ for finder in sys.meta_path]
        threads = sorted(thread.name for thread in threading.enumerate())
        return id(process), id(process.writer), process.server, os.environ["H2D_PATCH_SERVER"], finders, threads
    register()
    first = look()
    register()
    print(look() == first, first[-1], first[2] == first[3], flush=True)
    if os.fork() == 0:
        child = look()
        register()
        print(look() == child, child[-1], child[2:4] == first[2:4], child[1] != first[1], flush=True)
        os._exit(0)
    os.wait()
    """
    server.prelude = "import os, sys\nfrom h2d_patch.plugin import register\n"
    first, child = server.run(script).stdout.splitlines()
    assert first == "True ['MainThread', 'h2d_patch-state'] True"
    assert child == "True ['MainThread', 'h2d_patch-state'] True True"


def test_a_function_that_this_release_lacks_is_absent(server: Server) -> None:
    done = server.run(
        "register()\nimport our_model\nfrom h2d_patch import process\nprint(json.dumps(process.current.state()['targets'][-1]))"
    )
    assert target(done)["verdict"] == "absent"


def test_fixes_that_are_not_selected_are_off(server: Server) -> None:
    done = server.run(
        "register()\nfrom h2d_patch import process\nprint(json.dumps(process.current.state()['targets'][0]))"
    )
    assert (target(done)["verdict"], target(done)["reason"]) == ("off", "not selected by H2D_PATCH")


@pytest.mark.parametrize("value", ["", "0", " 0 "])
def test_with_the_variable_unset_nothing_is_imported_written_or_hooked(server: Server, value: str) -> None:
    done = server.run(
        "register()\nprint(sorted(m for m in sys.modules if m.startswith('h2d_patch')), len(sys.meta_path))",
        H2D_PATCH=value,
    )
    assert done.stdout.split("\n")[0].startswith("['h2d_patch', 'h2d_patch.plugin']")
    assert not (server.path / "run").exists()


def test_register_with_nothing_enabled_takes_under_50_ms_and_leaves_cuda_alone(server: Server) -> None:
    script = """
    start = time.perf_counter()
    register()
    print(time.perf_counter() - start, torch.cuda.is_initialized())
    """
    server.prelude = "import time, torch\nstart = time.perf_counter()\nfrom h2d_patch.plugin import register\n"
    script = "register()\nprint(time.perf_counter() - start, torch.cuda.is_initialized())"
    seconds, initialised = server.run(script, H2D_PATCH="").stdout.split()
    assert float(seconds) < 0.05 and initialised == "False"


def test_import_and_register_with_nothing_enabled_import_nothing_else_and_start_no_thread(server: Server) -> None:
    server.prelude = "import sys, threading, time\nbefore, start = set(sys.modules), time.perf_counter()\n"
    script = "from h2d_patch.plugin import register\nregister()\ntook = time.perf_counter() - start\n"
    script += "print(took, threading.active_count(), *sorted(set(sys.modules) - before))"
    for value in ("", "0"):
        took, threads, *imported = server.run(script, H2D_PATCH=value).stdout.split()
        assert float(took) < 0.05 and threads == "1"
        assert imported == ["__future__", "h2d_patch", "h2d_patch.plugin"]


def test_an_error_in_a_copy_function_runs_the_original_once_and_turns_the_fix_off(server: Server) -> None:
    script = """
    register()
    import our_model
    from h2d_patch import process
    patch = process.current.patches[-2]
    def broken(*args, **kwargs):
        raise OSError("no such luck")
    from h2d_patch.copies.call import falling_back
    from h2d_patch.copies.h2d import original_to_device
    patch.site.bind("to_device", falling_back(broken, original_to_device)(patch.site))
    model = our_model.Model()
    first, second = (model.forward(torch.ones(3)).tolist() for _ in range(2))
    print(first, second, our_model.Model.runs)
    print(json.dumps(process.current.state()["targets"][-2]))
    """
    done = server.run(script)
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0] [2.0, 2.0, 2.0] 2"
    found = target(done)
    assert (found["verdict"], found["calls"], found["fallbacks"]) == ("failed", 1, 1)
    assert "OSError: no such luck" in found["reason"]
    assert "our-model is off in this process" in done.stderr


def test_the_model_s_own_exception_passes_untouched_and_the_function_runs_once(server: Server) -> None:
    script = """
    register()
    import our_model
    from h2d_patch import process
    try:
        our_model.Model().forward(torch.ones(1), bad=True)
    except ValueError as error:
        print(error, error.__context__, our_model.Model.runs)
    try:
        our_model.Model().forward("no tensor")
    except AttributeError as error:
        print(error, error.__context__, our_model.Model.runs)
    print(json.dumps(process.current.state()["targets"][-2]))
    """
    done = server.run(script)
    lines = done.stdout.splitlines()
    assert lines[0] == "the model's own None 1"
    assert lines[1] == "'str' object has no attribute 'to' None 2"
    assert target(done)["verdict"] == "active"


def test_a_fix_whose_self_test_fails_is_not_put_in(server: Server) -> None:
    script = """
    from h2d_patch.copies import h2d
    from h2d_patch.copies.call import falling_back
    wrong = falling_back(lambda src, dev: src + 1, h2d.original_to_device)
    h2d.BINDERS = {**h2d.BINDERS, "to_device": wrong}
    """ + CALL.replace("\n", "\n    ")
    done = server.run(script)
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0]"
    assert target(done)["verdict"] == "failed" and "self-test: the result holds other bytes" in target(done)["reason"]


def test_a_changed_source_is_refused_and_the_original_runs(server: Server) -> None:
    (server.path / "our_model.py").write_text(MODEL.replace("non_blocking=True", "non_blocking=False"))
    done = server.run(CALL)
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0]"
    assert target(done)["verdict"] == "refused" and "occurs 0 times" in target(done)["reason"]
    assert "refused" in done.stderr


WRAPPERS = {
    "by hand": "def wrapper(*a, **k):\n    return inner(*a, **k)\n",
    "functools.wraps": "import functools\n@functools.wraps(inner)\ndef wrapper(*a, **k):\n    return inner(*a, **k)\n",
    "wrapt": "import wrapt\n@wrapt.decorator\ndef around(f, instance, a, k):\n    return f(*a, **k)\nwrapper = around(inner)\n",
    "a class": "class Wrapper:\n    def __get__(self, *at):\n        return inner.__get__(*at)\nwrapper = Wrapper()\n",
    "a partial": "import functools\nwrapper = functools.partialmethod(inner)\n",
    "another function": "def wrapper(self, x):\n    return x + 1\n",
}


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_function_wrapped_by_another_plugin_is_refused_and_what_wraps_it_named(server: Server, how: str) -> None:
    (server.path / "other_plugin.py").write_text(
        f"import our_model\ninner = our_model.Model.forward\n{WRAPPERS[how]}our_model.Model.forward = wrapper\n"
    )
    done = server.run("import other_plugin\n" + CALL)
    found = target(done)
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0]"
    assert found["verdict"] == "refused"
    assert ("functools.partialmethod" if how == "a partial" else "other_plugin") in found["reason"]


def test_a_wrapper_that_comes_after_us_keeps_the_fix_inside_it(server: Server) -> None:
    script = """
    register()
    import our_model
    inner = our_model.Model.forward
    our_model.Model.forward = lambda self, x: inner(self, x)
    from h2d_patch import process
    our_model.Model().forward(torch.ones(3))
    print(json.dumps(process.current.state()["targets"][-2]))
    """
    found = target(server.run(script))
    assert (found["verdict"], found["calls"]) == ("active", 1)


def test_a_subclass_of_another_package_that_overrides_the_function_is_named(server: Server) -> None:
    (server.path / "platform_plugin.py").write_text(
        "import our_model\nclass Model(our_model.Model):\n    def forward(self, x):\n        return x\n"
        "class Kept(our_model.Model):\n    pass\n"
    )
    found = target(server.run(CALL.replace("import our_model", "import our_model, platform_plugin")))
    assert (found["verdict"], found["calls"]) == ("active", 1)
    assert found["reason"] == "not in platform_plugin.Model, which overrides it"


NO_SOURCE = {
    "compiled": (
        "import py_compile; py_compile.compile(PATH, PATH + 'c'); os.remove(PATH)",
        "our_model.pyc is compiled",
    ),
    "in an archive": (
        "import zipfile; z = zipfile.ZipFile(PATH[:-3] + '.zip', 'w'); z.write(PATH, 'our_model.py'); z.close()\n"
        "os.remove(PATH); sys.path.insert(0, PATH[:-3] + '.zip')",
        "our_model.zip/our_model.py cannot be read as source",
    ),
    "gone since it was loaded": ("import our_model; os.remove(PATH)", "our_model.py cannot be read as source"),
    "changed since it was loaded": (
        "import our_model; open(PATH, 'w').write('x = 1')",
        "our_model.py is not the source of the running function",
    ),
}


@pytest.mark.parametrize("how", NO_SOURCE)
def test_a_module_without_its_source_is_refused_and_the_original_runs(server: Server, how: str) -> None:
    script, says = NO_SOURCE[how]
    script = script.replace("PATH", repr(str(server.path / "our_model.py")))
    done = server.run(script + "\n" + CALL)
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0]"
    assert target(done)["verdict"] == "refused" and says in target(done)["reason"]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("99.0", "vLLM 99.0 is new"),
        ("0.22.1+vendor", ""),
        ("0.22.2.dev7", "none of the releases"),
        ("dev", "cannot be told"),
    ],
)
def test_the_log_says_at_the_start_when_nobody_has_looked_at_this_release(
    server: Server, version: str, says: str
) -> None:
    (server.path / "vllm.py").write_text(f"__version__ = {version!r}\n")
    done = server.run("import logging, vllm\nlogging.basicConfig(level=logging.INFO)\n" + CALL)
    (line,) = [line for line in done.stderr.splitlines() if "(h2d-patch status)" in line]
    assert says in line and (says or line.endswith("(h2d-patch status)"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("H2D_PATCH", "nonsense", "unknown fix 'nonsense'"),
        ("H2D_PATCH_PINNED_MB", "lots", "H2D_PATCH_PINNED_MB='lots'"),
        ("H2D_PATCH_MANIFEST", "/nowhere.toml", "/nowhere.toml"),
        ("H2D_PATCH_SERVER", "a/b", "H2D_PATCH_SERVER='a/b'"),
    ],
)
def test_a_bad_setting_leaves_the_server_running_unpatched_and_is_said(
    server: Server, name: str, value: str, says: str
) -> None:
    done = server.run(CALL + "register()\n", **{name: value})
    assert done.stdout.splitlines() == ["[2.0, 2.0, 2.0]", "inert"]
    assert says in done.stderr and len([line for line in done.stderr.splitlines() if "h2d_patch" in line]) == 1
    assert says in server.states()[0]["error"]
    strict = server.run(CALL, check=False, H2D_PATCH_STRICT="1", **{name: value})
    assert strict.returncode != 0 and says in strict.stderr.splitlines()[-1]
    for command in (["list"], ["selftest"]):
        shown = server.status(*command, **{name: value})
        assert shown.returncode == 2 and says in shown.stderr and len(shown.stderr.splitlines()) == 1
    shown = server.status("status", **{name: value})
    assert shown.returncode == 1 and says in shown.stdout and shown.stderr == "", (
        "what is wrong in a shell is no matter"
    )


def test_strict_makes_a_refusal_fatal_at_the_import(server: Server) -> None:
    (server.path / "our_model.py").write_text(MODEL.replace("non_blocking=True", "non_blocking=False"))
    done = server.run(CALL, check=False, H2D_PATCH_STRICT="1")
    assert done.returncode != 0 and "StrictError: h2d_patch: our-model refused" in done.stderr


def test_undo_restores_the_identical_code_and_verdicts_say_so(server: Server) -> None:
    script = """
    import our_model
    code = our_model.Model.forward.__code__
    register()
    from h2d_patch import process
    patched = our_model.Model.forward.__code__
    process.current.undo()
    print(patched is not code, our_model.Model.forward.__code__ is code, our_model.Model().forward(torch.ones(1)).item())
    print(json.dumps(process.current.state()["targets"][-2]))
    """
    done = server.run(script)
    assert done.stdout.splitlines()[0] == "True True 2.0"
    assert target(done)["verdict"] == "off"


FORK = """
    register()
    import our_model
    from h2d_patch import process
    our_model.Model().forward(torch.ones(3))
    child = os.fork()
    if child == 0:
        our_model.Model().forward(torch.ones(3))
        our_model.Model().forward(torch.ones(3))
        time.sleep(3)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(1.5)
"""


def test_a_forked_child_keeps_the_fixes_and_has_a_state_of_its_own(server: Server) -> None:
    server.run(FORK)
    states = server.states()
    assert len({state["pid"] for state in states}) == 2
    calls = sorted(state["targets"][-2]["calls"] for state in states)
    assert calls == [1, 2]
    assert {state["targets"][-2]["verdict"] for state in states} == {"active"}


def test_a_process_forked_while_another_thread_patches_does_not_hang(server: Server) -> None:
    script = """
    import threading
    register()
    from h2d_patch import process
    process.current.lock.acquire()
    holder = threading.Thread(target=lambda: None)
    def work():
        with process.current.lock:
            pass
    child = os.fork()
    if child == 0:
        thread = threading.Thread(target=work); thread.start(); thread.join(5)
        os._exit(1 if thread.is_alive() else 0)
    print(os.waitpid(child, 0)[1])
    """
    assert server.run(script).stdout.split() == ["0"]


def test_a_spawned_child_registers_for_itself(server: Server) -> None:
    (server.path / "child_main.py").write_text(
        "from h2d_patch.plugin import register\nregister()\nimport our_model, torch, time\n"
        "def main():\n    our_model.Model().forward(torch.ones(3))\n    time.sleep(2)\n"
    )
    script = """
    import multiprocessing
    import child_main
    child = multiprocessing.get_context("spawn").Process(target=child_main.main, name="VllmWorker-3")
    child.start(); child.join()
    """
    server.run(script)
    assert {state["role"] for state in server.states()} == {"api-server", "worker"}
    server.run("    register()" + script, H2D_PATCH="nonsense")
    unpatched = [state["server"] for state in server.states() if "error" in state]
    assert len(unpatched) == 2 and len(set(unpatched)) == 1, "one server's, although no setting could be read"


def test_status_shows_processes_marks_the_dead_and_cleans_them(server: Server) -> None:
    server.run(CALL)
    shown = server.status("status")
    assert "(dead; h2d-patch status --clean removes it)" in shown.stdout
    assert (
        "our_model:Model.forward" not in shown.stdout
        and "our_model:Model.forward" in server.status("status", "--all").stdout
    )
    printed = json.loads(server.status("status", "--json").stdout)
    assert [process["alive"] for process in printed["processes"]] == [False]
    assert {"fix", "function", "verdict", "reason", "calls", "fallbacks", "selftest_ms"} <= set(
        printed["processes"][0]["targets"][0]
    )
    cleaned = server.status("status", "--clean").stdout
    assert "No process has written" in cleaned and cleaned.count("\nremoved ") == 1
    assert f"\nremoved {server.path / 'run/state-'}" in cleaned
    assert server.states() == []
    assert json.loads(server.status("status", "--clean", "--json").stdout)["removed"] == []


def test_status_refuses_a_damaged_state_file_and_names_it(server: Server) -> None:
    (server.path / "run").mkdir(mode=0o700)
    (server.path / "run/state-1.json").write_text('{"schema": 1, "pi')
    shown = server.status("status")
    assert shown.returncode == 2 and "state-1.json" in shown.stderr and "expected a state file" in shown.stderr
    (server.path / "run/state-1.json").write_text('{"schema": 99, "pid": 1}')
    assert "schema: found 99; expected 2" in server.status("status").stderr


def test_a_run_directory_that_is_not_ours_costs_the_server_nothing(server: Server) -> None:
    (server.path / "run").mkdir()
    (server.path / "run").chmod(0o777)
    done = server.run(CALL)
    assert target(done)["verdict"] == "active"
    assert "can be written by others" in done.stderr
    shown = server.status("status")
    assert shown.returncode == 2 and "can be written by others" in shown.stderr


def test_status_says_that_vllm_plugins_leaves_us_out(server: Server) -> None:
    shown = server.status("status", VLLM_PLUGINS="another_plugin")
    assert "VLLM_PLUGINS='another_plugin' leaves h2d_patch out" in shown.stdout


def test_a_switched_off_fix_costs_under_a_microsecond(server: Server) -> None:
    script = """
    import timeit
    register()
    import our_model
    from h2d_patch import process
    model, x = our_model.Model(), torch.ones(1)
    original = type(model).forward
    patch = process.current.patches[-2]
    plain = {}
    exec(open(our_model.__file__).read(), plain)
    plain = plain["Model"]()
    patch.site.on = False
    def best(f): return min(timeit.repeat(lambda: f.forward(x), number=5000, repeat=15)) / 5000
    print(best(model) - best(plain))
    """
    assert float(server.run(script).stdout) < 1e-6


WORKER_BASE = """
import torch, types

class Runner:
    pass

class WorkerWrapperBase:
    rpc_rank = 5

    def init_device(self):
        self.worker = types.SimpleNamespace(
            device=torch.device("cpu"), rank=5, model_runner=Runner(), use_v2_model_runner=True, vllm_config=None
        )
        return "ready"
"""


def with_vllm(server: Server, worker_base: str = WORKER_BASE) -> None:
    package = server.path / "vllm/v1/worker"
    package.mkdir(parents=True)
    for directory in (server.path / "vllm", server.path / "vllm/v1", package):
        (directory / "__init__.py").touch()
    (package / "worker_base.py").write_text(worker_base)


STARTED = """
    register()
    import our_model
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    from h2d_patch import process
    print(WorkerWrapperBase().init_device())
    state = process.current.state()
    print(state["role"], state["rank"])
    print(json.dumps(state["targets"][-2]))
"""


def test_device_start_up_makes_a_process_a_worker_with_its_rank(server: Server) -> None:
    with_vllm(server)
    done = server.run(STARTED)
    assert done.stdout.splitlines()[:2] == ["ready", "worker 5"]
    assert target(done)["verdict"] == "active"
    assert server.states()[0]["device"] == {"name": "cpu"}


def test_a_target_whose_owner_is_of_another_class_does_not_apply_there(server: Server) -> None:
    with_vllm(server)
    owned = MANIFEST.replace(
        'function = "our_model:Model.forward"', 'function = "our_model:Model.forward"\nowner = "model_runner"'
    )
    (server.path / "ours.toml").write_text(owned)
    found = target(server.run(STARTED))
    assert found["verdict"] == "absent"
    assert "does not apply" in found["reason"] and "Model Runner V2" in found["reason"]


def test_a_target_whose_owner_is_a_subclass_that_keeps_the_method_applies(server: Server) -> None:
    with_vllm(server, WORKER_BASE.replace("class Runner:", "import our_model\nclass Runner(our_model.Model):"))
    owned = MANIFEST.replace(
        'function = "our_model:Model.forward"', 'function = "our_model:Model.forward"\nowner = "model_runner"'
    )
    (server.path / "ours.toml").write_text(owned)
    assert target(server.run(STARTED))["verdict"] == "active"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("parallel_config=types.SimpleNamespace(pipeline_parallel_size=2)", "pipeline parallelism"),
        ("model_config=types.SimpleNamespace(runner_type='pooling')", "pooling"),
    ],
)
def test_where_only_the_original_s_wait_orders_other_buffers_the_fix_stays_off(
    server: Server, config: str, says: str
) -> None:
    worker_base = WORKER_BASE.replace("vllm_config=None", f"vllm_config=types.SimpleNamespace({config})")
    with_vllm(server, worker_base.replace('torch.device("cpu")', 'torch.device("cuda")'))
    found = target(server.run(STARTED))
    assert (found["verdict"], says in found["reason"]) == ("off", True)
    guarded = worker_base.replace("Runner(),", "types.SimpleNamespace(prepare_inputs_event=1),")
    file = server.path / "vllm/v1/worker/worker_base.py"
    file.write_text(guarded.replace('torch.device("cpu")', 'torch.device("cuda")'))
    assert target(server.run(STARTED))["verdict"] != "off", "vLLM's own event orders them"


@pytest.mark.parametrize(
    ("config", "measured"), [("kv_transfer_config=None", False), ("kv_transfer_config=1", True), ("other=1", True)]
)
def test_a_device_is_measured_only_where_blocks_are_swapped(server: Server, config: str, measured: bool) -> None:
    worker_base = WORKER_BASE.replace("vllm_config=None", f"vllm_config=types.SimpleNamespace({config})")
    with_vllm(server, worker_base.replace('torch.device("cpu")', 'torch.device("cuda")'))
    start = """
    from h2d_patch import copies
    def start(device, pinned_bytes, places):
        print("places", places is not None)
        return copies.StartReport(str(device), 0, False, [], 0.0)
    copies.start = start
    """
    assert f"places {measured}" in server.run(textwrap.dedent(start) + textwrap.dedent(STARTED)).stdout


def test_a_device_start_up_that_fails_on_our_side_leaves_vllm_s_alone(server: Server) -> None:
    with_vllm(
        server, WORKER_BASE.replace("self.worker = types.SimpleNamespace(", "self.other = types.SimpleNamespace(")
    )
    done = server.run(STARTED)
    assert done.stdout.splitlines()[0] == "ready"
    assert "device start-up failed; the originals run" in done.stderr


def test_the_device_start_up_is_hooked_where_0_11_0_has_it(server: Server) -> None:
    with_vllm(server, "from vllm.worker.worker_base import WORKER_BASES\n")
    old = server.path / "vllm/worker"
    old.mkdir()
    (old / "__init__.py").touch()
    (old / "worker_base.py").write_text(WORKER_BASE + "WORKER_BASES = 1\n")
    script = """
    register()
    import our_model
    import vllm.v1.worker.worker_base
    from vllm.worker.worker_base import WorkerWrapperBase as Wrapper
    from h2d_patch import process
    print(Wrapper().init_device(), process.current.state()["role"])
    process.current.undo()
    print(type(vars(Wrapper)["init_device"]).__name__)
    """
    done = server.run(script)
    assert done.stdout.split() == ["ready", "worker", "function"]
    assert "failed" not in done.stderr


def test_the_device_start_up_runs_in_a_ray_actor_whose_class_has_its_own_copy_of_each_method(server: Server) -> None:
    with_vllm(server)
    script = """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    class Actor(WorkerWrapperBase):
        pass

    def copy_of(method):
        return lambda self: method(self)

    original = Actor.init_device = copy_of(WorkerWrapperBase.init_device)  # before vLLM loads plugins there
    register()
    from h2d_patch import process
    starts = []
    process.Process._never_runs = lambda self, target: starts.append(target.function)
    print(Actor().init_device(), process.current.state()["role"], process.current.rank)
    print(len(starts) == len(set(starts)) > 0)
    process.current.undo()
    print(vars(Actor)["init_device"] is original)
    """
    assert server.run(script).stdout.split() == ["ready", "worker", "5", "True", "True"]


def test_the_device_comes_up_once_where_one_hooked_method_calls_another(server: Server) -> None:
    with_vllm(server)
    script = """
    import vllm.v1.worker.worker_base as base

    class Own(base.WorkerWrapperBase):
        def init_device(self):
            return super().init_device()

    register()
    from h2d_patch import process
    starts = []
    process.Process._never_runs = lambda self, target: starts.append(target.function)
    Own().init_device()
    print(len(starts) == len(set(starts)) > 0)
    """
    assert server.run(script).stdout.split() == ["True"]


def test_undo_takes_the_device_start_up_out_too(server: Server) -> None:
    with_vllm(server)
    script = """
    import vllm.v1.worker.worker_base as base
    original = vars(base.WorkerWrapperBase)["init_device"]
    register()
    from h2d_patch import process
    hooked = vars(base.WorkerWrapperBase)["init_device"]
    process.current.undo()
    print(hooked is not original, vars(base.WorkerWrapperBase)["init_device"] is original)
    """
    assert server.run(script).stdout.split() == ["True", "True"]


FORMS_TO_TRACE = {
    "expression": ("return x.to('cpu', non_blocking=True) + 1\n", ("", "")),
    "statements": (
        "for y in [x]:\n        z = y.to('cpu', non_blocking=True)\n    return z + 1\n",
        (
            'find = "SRC.to(DEV, non_blocking=True)"\nput = "to_device(SRC, DEV)"',
            'find = "for SRC in ALL:\\n    OUT = SRC.to(DEV, non_blocking=True)"\nput = "OUT = to_device(ALL[0], DEV)"',
        ),
    ),
}


@pytest.mark.parametrize("form", FORMS_TO_TRACE)
def test_a_function_that_torch_compile_traces_is_traced_as_the_original(server: Server, form: str) -> None:
    script = """
    register()
    import our_model
    from h2d_patch import process
    graphs = []
    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward
    compiled = torch.compile(lambda x: our_model.forward(x), backend=backend, fullgraph=True)
    print(compiled(torch.ones(2)).tolist())
    for on, timed in ((False, False), (False, True), (True, True)):  # neither is anything that the graph depends on
        for patch in process.current.patches:
            patch.site.on, patch.site.timed = on, timed
        compiled(torch.ones(2))
    process.current.undo()
    torch._dynamo.reset()
    compiled(torch.ones(2))
    print(len(graphs), len(set(graphs)))
    print(json.dumps(process.current.state()["targets"][-2]))
    """
    model, put = FORMS_TO_TRACE[form]
    (server.path / "our_model.py").write_text(f"def forward(x):\n    {model}")
    (server.path / "ours.toml").write_text(MANIFEST.replace("Model.forward", "forward").replace(*put, 1))
    done = server.run(script)
    assert done.stdout.splitlines()[:2] == ["[2.0, 2.0]", "2 1"]  # one with us, the same without us
    assert target(done)["calls"] == 0
    assert not any(arm["count"] for arm in target(done)["arms"].values())


def test_a_child_forked_while_locks_are_held_and_collection_is_paused_goes_on(server: Server) -> None:
    script = """
    import gc, threading
    register()
    from h2d_patch import process
    from h2d_patch.patching import install
    held, release = threading.Event(), threading.Event()
    def hold():
        with process._start_lock, install._lock, process.current.switches["our-model"]._lock, process._gc_paused():
            held.set()
            release.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(60)
        register()
        import our_model
        our_model.Model().forward(torch.ones(1))
        process.current.switches["our-model"].turn(False)
        os._exit(0 if gc.isenabled() and process.current.patches[-2].verdict.value == "active" else 1)
    status = os.waitpid(child, 0)[1]
    release.set()
    thread.join()
    print(status)
    """
    assert server.run(script).stdout.split() == ["0"]


def test_a_module_imported_under_another_default_device_is_patched(server: Server) -> None:
    script = CALL.replace("import our_model\n", "with torch.device('meta'):\n    import our_model\n")
    assert target(server.run(script))["verdict"] == "active"


def test_without_any_temporary_directory_the_server_starts(server: Server) -> None:
    script = """
    import tempfile
    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")
    tempfile.gettempdir = nowhere
    register()
    print("started")
    """
    done = server.run(script, H2D_PATCH_RUN_DIR="")
    assert done.stdout.split() == ["started"] and "H2D_PATCH_RUN_DIR is not set" in done.stderr


TWO = MANIFEST.replace('function = "our_model:gone"', 'function = "second_model:Model.forward"')


def test_a_fix_that_failed_stays_off_for_modules_that_come_later(server: Server) -> None:
    (server.path / "ours.toml").write_text(TWO)
    (server.path / "second_model.py").write_text(MODEL)
    script = """
    register()
    import our_model
    from h2d_patch import process
    process.current.patches[-2].site.failed(OSError("ours"))
    import second_model
    print(json.dumps(process.current.state()["targets"][-1]))
    """
    done = server.run(script)
    assert target(done)["verdict"] == "failed" and "off with Model.forward: OSError: ours" in target(done)["reason"]


def test_many_threads_failing_at_once_are_said_once(server: Server) -> None:
    script = """
    import threading
    register()
    import our_model
    from h2d_patch import process
    site = process.current.patches[-2].site
    threads = [threading.Thread(target=lambda: site.failed(OSError("ours"))) for _ in range(20)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """
    assert server.run(script).stderr.count("is off in this process") == 1


def test_strict_makes_every_import_fail_not_only_the_first(server: Server) -> None:
    (server.path / "our_model.py").write_text(MODEL.replace("non_blocking=True", "non_blocking=False"))
    script = """
    register()
    for _ in range(3):
        try:
            import our_model
        except Exception as error:
            print(type(error).__name__)
    """
    assert server.run(script, H2D_PATCH_STRICT="1").stdout.split() == ["StrictError"] * 3


def test_strict_minds_a_run_directory_that_cannot_be_used(server: Server) -> None:
    done = server.run(CALL, check=False, H2D_PATCH_STRICT="1", H2D_PATCH_RUN_DIR="/etc/passwd")
    assert done.returncode != 0 and "run directory /etc/passwd" in done.stderr.splitlines()[-1]


def test_a_module_half_imported_at_register_is_patched_at_the_device_start_up(server: Server) -> None:
    with_vllm(server)
    (server.path / "our_model.py").write_text("from h2d_patch.plugin import register\nregister()\n" + MODEL)
    assert target(server.run(STARTED.replace("register()\n    import", "import")))["verdict"] == "active"


def test_after_undo_the_device_start_up_is_not_hooked(server: Server) -> None:
    with_vllm(server)
    script = """
    register()
    from h2d_patch import process
    process.current.undo()
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    print(type(vars(WorkerWrapperBase)["init_device"]).__name__)
    """
    assert server.run(script).stdout.split() == ["function"]


def test_a_replaced_function_whose_helper_does_more_than_known_is_left_alone(server: Server) -> None:
    source = """
import torch

def walk(value, device):
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(walk(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(walk(item, device) for item in value)
    if isinstance(value, dict):
        return {key: walk(item, device) for key, item in value.items()}
    return value.to(device=device, non_blocking=True) if isinstance(value, torch.Tensor) else value

def h2d(tensors, device):
    return tensors if device is None else walk(tensors, device)
"""
    (server.path / "our_model.py").write_text(source)
    from h2d_patch.patching.recognise import source_hash
    from h2d_patch.patching.rewrite import ModuleSource

    known = source_hash(ModuleSource(source.encode(), "m.py").named("h2d")[0])
    (server.path / "ours.toml").write_text(
        f"""
manifest = 1
[patch.our-model]
why = "x"
[[patch.our-model.target]]
function = "our_model:h2d"
[patch.our-model.target.replace]
put = "nested_to_device"
known = ["{known}"]
given = ["tensors = nested()", "device = device"]
"""
    )
    script = """
    register()
    import our_model
    from h2d_patch import process
    print(json.dumps(process.current.state()["targets"][-1]))
    """
    found = target(server.run(script))
    assert found["verdict"] == "failed" and "self-test" in found["reason"]


@pytest.mark.parametrize(
    "content",
    [
        {"pid": "abc"},
        {"targets": 3},
        {"targets": [{}]},
        {"role": []},
        {"device": None},
        {"server": 7},
        {"switches": []},
        {"targets": [{"fix": "a", "function": "b", "verdict": "active", "reason": None, "calls": 1, "fallbacks": 0}]},
    ],
)
def test_a_state_file_of_another_shape_is_one_clear_line(server: Server, content: dict[str, Any]) -> None:
    (server.path / "run").mkdir(mode=0o700)
    whole = {"schema": 2, "pid": 1, "role": "worker", "server": "a", "switches": {}, "targets": [], **content}
    (server.path / "run/state-host-1.json").write_text(json.dumps(whole))
    shown = server.status("status")
    assert shown.returncode == 2 and len(shown.stderr.splitlines()) == 1 and next(iter(content)) in shown.stderr


@pytest.mark.parametrize("value", ["/etc/passwd/x", "/tmp/" + "a" * 300])
def test_a_run_directory_that_cannot_be_is_one_clear_line(server: Server, value: str) -> None:
    shown = server.status("status", H2D_PATCH_RUN_DIR=value)
    assert shown.returncode == 2 and len(shown.stderr.splitlines()) == 1 and "run directory" in shown.stderr


@pytest.mark.parametrize(
    "given", ['"SRC = tensor(1/0)", "DEV = device"', '"SRC = tensor(3, dtype=1)", "DEV = device"', '"SRC = tensor(3)"']
)
def test_stand_ins_that_do_not_fit_are_a_failed_self_test(server: Server, given: str) -> None:
    (server.path / "ours.toml").write_text(MANIFEST.replace('"SRC = tensor(size(1, 50), 2)", "DEV = device"', given))
    shown = server.status("selftest")
    assert shown.returncode == 1 and "the stand-ins in 'given' do not fit 'find'" in shown.stdout


def test_a_child_keeps_what_waits_for_the_device_start_up(server: Server) -> None:
    script = """
    register()
    from h2d_patch import process
    process.current._retry.append((process.STARTUP_MODULES[0], process.current._hook_startup))
    child = os.fork()
    if child == 0:
        os._exit(0 if process.STARTUP_MODULES[0] in dict(process.current._retry) else 1)
    print(os.waitpid(child, 0)[1])
    """
    assert server.run(script).stdout.split() == ["0"]


def test_an_error_in_a_gpu_self_test_is_a_failed_one_not_a_test_left_out(server: Server) -> None:
    with_vllm(server, WORKER_BASE.replace('torch.device("cpu")', 'torch.device("cuda")'))
    script = STARTED.replace(
        "    print(WorkerWrapperBase()",
        """    from h2d_patch.selftest import compare
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no more")
    compare.run = out_of_memory
    print(WorkerWrapperBase()""",
    )
    found = target(server.run(script))
    assert found["verdict"] == "failed" and "OutOfMemoryError: no more" in found["reason"]
