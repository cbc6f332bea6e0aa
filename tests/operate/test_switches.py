"""Switches in running processes: what takes them, what does not, and what no fault of theirs can cost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_server import ROOT, Running, Server

from h2d_patch.operate import control
from h2d_patch.operate.control import path_of, update
from h2d_patch.operate.switches import Switches
from h2d_patch.patching.switch import Switch

START = """
from h2d_patch.plugin import register
register()
import os, torch, our_model
from h2d_patch import process
model = our_model.Model()
def calls(times=1):
    before = process.current.patches[-2].site.calls
    for _ in range(times):
        if model.forward(torch.ones(3)).tolist() != [2.0] * 3:
            raise ArithmeticError
    return process.current.patches[-2].site.calls - before
_ = calls()
"""
# Without a module to patch, and so without torch.
BARE = "from h2d_patch.plugin import register\nregister()\nfrom h2d_patch import process\n"
CALLS = "_ = calls()"


def eventually(holds: Callable[[], Any], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


@pytest.fixture
def process(server: Server) -> Iterator[Running]:
    with server.running() as running:
        assert running(START) == 1
        yield running


def switch(server: Server, *arguments: str, **env: str) -> tuple[int, str]:
    done = server.status("switch", *arguments, **env)
    return done.returncode, done.stdout + done.stderr


def turn(server: Server, on: bool, *fixes: str, name: str | None = None, rank: int | None = None) -> None:
    (only,) = {state["server"] for state in server.states()} if name is None else {name}
    update(server.path / "run", only, lambda control: control.turned(fixes or ["our-model"], on, rank))


def test_a_fix_is_turned_off_and_on_again_in_a_running_process(server: Server, process: Running) -> None:
    status, text = switch(server, "our-model", "off")
    assert status == 0, text
    assert str(process.pid) in text and "API server" in text
    assert process(CALLS) == 0
    state = process.state()
    assert state["switches"] == {"our-model": False} and state["control"] is None
    assert (state["targets"][-2]["verdict"], state["targets"][-2]["reason"]) == ("off", "switched off")
    done = server.status("switch", "all", "on", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 0 and printed["taken"] and printed["took_s"] < 2
    assert [answer["why"] for answer in printed["answers"]] == [""]
    assert process(CALLS) == 1
    status, text = switch(server, "our-model", "off", H2D_PATCH="nonsense", H2D_PATCH_MANIFEST="/nowhere.toml")
    assert status == 0 and process(CALLS) == 0, "whatever is wrong in the operator's own shell"
    assert process.log.read_text() == ""


def test_what_has_failed_is_not_turned_on_again(server: Server, process: Running) -> None:
    raised = """
    from h2d_patch.copies.call import falling_back
    from h2d_patch.copies.h2d import original_to_device
    def broken(*args, **kwargs):
        raise torch.OutOfMemoryError("no more memory")
    patch = process.current.patches[-2]
    patch.site.bind("to_device", falling_back(broken, original_to_device)(patch.site))
    _ = calls(50)
    """
    assert process(raised) == 1, "always raising, it is called once and off from then on"
    assert switch(server, "our-model", "off")[0] == 0
    status, text = switch(server, "our-model", "on")
    assert status == 1 and "Model.forward stays failed: torch.OutOfMemoryError: no more memory" in text
    assert process("_ = calls(50)") == 0
    assert process.log.read_text().count("no more memory") == 1


def test_what_is_kept_off_or_was_not_selected_is_not_turned_on(server: Server, process: Running) -> None:
    process("process.current._take_out(process.current.patches[-2], process.Verdict.OFF, 'kept off on purpose')")
    assert eventually(lambda: server.states()[0]["targets"][-2]["reason"] == "kept off on purpose")
    status, text = switch(server, "our-model", "on")
    assert status == 1 and "Model.forward stays off: kept off on purpose" in text
    assert process(CALLS) == 0
    status, text = switch(server, "kv-swap", "on")
    assert status == 2 and "kv-swap is not selected by H2D_PATCH in any live server; that takes the variable" in text
    status, text = switch(server, "kv-swap", "off", "--server", server.states()[0]["server"])
    assert status == 2 and f"in server {server.states()[0]['server']}; that takes the variable" in text
    status, text = switch(server, "kv-swop", "on")
    assert status == 2 and "no live server has a fix 'kv-swop'; expected one of: all, our-model" in text


def test_children_forked_and_spawned_take_the_switches_of_their_parent_s_server(server: Server) -> None:
    (server.path / "child_main.py").write_text(
        "from h2d_patch.plugin import register\nregister()\nimport time\ndef main():\n    time.sleep(60)\n"
    )
    start = """
    import multiprocessing, os, time, child_main
    pids = [os.getpid(), os.fork()]
    if pids[1] == 0:
        register()
        time.sleep(60)
        os._exit(0)
    spawned = multiprocessing.get_context("spawn").Process(target=child_main.main, daemon=True)
    spawned.start()
    _ = [*pids, spawned.pid]
    """
    with server.running() as running:
        running(BARE)
        pids = running(start)
        assert eventually(lambda: len(server.states()) == 3)
        states = {state["pid"]: state for state in server.states()}
        assert sorted(states) == sorted(pids)
        assert len({state["server"] for state in states.values()}) == 1
        assert f"-{running.pid}-{states[running.pid]['start_time']}" in states[running.pid]["server"]
        for word, on in (("off", False), ("on", True)):
            status, text = switch(server, "all", word)
            assert status == 0 and all(str(pid) in text for pid in pids)
            assert [state["switches"] for state in server.states()] == [{"our-model": on}] * 3
        running("os.kill(pids[1], 9); spawned.kill(); spawned.join()")


def test_a_restarted_process_starts_as_the_switches_say_and_a_new_server_as_its_environment_does(
    server: Server,
) -> None:
    with server.running(H2D_PATCH_SERVER="first") as running:
        running(BARE)
        turn(server, False)
        assert eventually(lambda: running.state()["switches"] == {"our-model": False})
        with server.running(H2D_PATCH_SERVER="first") as restarted:
            assert restarted(START) == 0
            assert restarted.state()["targets"][-2]["verdict"] == "off"
        with server.running() as another:
            another(BARE)
            assert another.state()["switches"] == {"our-model": True}
    with server.running(H2D_PATCH_SERVER="first") as later:  # with the name of one that has ended
        later(BARE)
        assert later.state()["switches"] == {"our-model": True}


def test_one_server_or_one_rank_is_switched_and_the_others_are_left_alone(server: Server) -> None:
    as_rank = "process.current.is_worker, process.current.rank = True, {}\nprocess.current.writer.write()"
    with (
        server.running(H2D_PATCH_SERVER="one") as first,
        server.running(H2D_PATCH_SERVER="one") as second,
        server.running(H2D_PATCH_SERVER="two") as other,
    ):
        for rank, running in enumerate((first, second, other)):
            running(BARE + as_rank.format(rank))
        assert switch(server, "our-model", "off", "--server", "one", "--rank", "1")[0] == 0

        def on() -> list[bool]:
            return [running.state()["switches"]["our-model"] for running in (first, second, other)]

        assert on() == [True, False, True]
        assert switch(server, "our-model", "off", "--server", "two")[0] == 0
        assert on() == [True, False, False]
        assert switch(server, "our-model", "on")[0] == 0
        assert on() == [True, True, True]
        status, text = switch(server, "our-model", "off", "--server", "three")
        assert status == 2 and "no live server three" in text and "there: one, two" in text
        status, text = switch(server, "our-model", "off", "--rank", "7")
        assert status == 2 and "no live worker has rank 7; expected one of [0, 1, 2]" in text
        assert on() == [True, True, True]


def test_a_process_that_does_not_answer_is_named(server: Server) -> None:
    import signal

    with server.running() as running:
        running(BARE)
        os.kill(running.pid, signal.SIGSTOP)
        try:
            status, text = switch(server, "all", "off")
        finally:
            os.kill(running.pid, signal.SIGCONT)
        assert status == 1 and f"{running.pid}" in text and "our-model not taken: no answer yet" in text
        assert eventually(lambda: running.state()["switches"] == {"our-model": False})


def test_without_a_live_server_the_command_says_where_it_looked(server: Server) -> None:
    status, text = switch(server, "all", "off")
    assert status == 2 and f"no live server in {server.path / 'run'}" in text
    server.run("register()")
    status, text = switch(server, "all", "off")
    assert status == 2 and "no live server" in text
    assert list((server.path / "run").glob("control*")) == []


def test_a_control_file_that_is_not_ours_is_said_once_and_changes_nothing(server: Server) -> None:
    with server.running() as running:
        running(BARE)
        turn(server, False)
        assert eventually(lambda: running.state()["switches"] == {"our-model": False})
        path = path_of(server.path / "run", running.state()["server"])
        whole = path.read_text()
        path.write_text(whole.replace("false", "true"))
        path.chmod(0o606)
        assert eventually(lambda: server.states()[0]["control"])
        time.sleep(1.2)
        assert running.state()["switches"] == {"our-model": False}
        assert "can be written by others (mode 0606)" in server.states()[0]["control"]
        assert running.log.read_text().count("the switches stay as they are") == 1
        shown = server.status("status")
        assert shown.returncode == 1 and "can be written by others (mode 0606)" in shown.stdout
        status, text = switch(server, "all", "on")
        assert status == 0 and "since no process could read it" in text
        assert running.state()["switches"] == {"our-model": True} and running.state()["control"] is None


def test_a_run_directory_that_is_gone_comes_back_and_switches_go_on(server: Server, process: Running) -> None:
    turn(server, False)
    assert eventually(lambda: process(CALLS) == 0)
    shutil.rmtree(server.path / "run")
    assert eventually(server.states)
    assert process(CALLS) == 0, "what was switched stays so"
    assert switch(server, "our-model", "on")[0] == 0
    assert process(CALLS) == 1


def test_a_full_disk_costs_the_state_and_a_line_and_nothing_else(server: Server, process: Running) -> None:
    process("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))")  # room for a line of the log
    turn(server, False)
    assert eventually(lambda: process(CALLS) == 0), "it is switched all the same"
    time.sleep(2)
    assert server.states()[0]["switches"] == {"our-model": True}, "the last one that could be written whole"
    assert eventually(lambda: not list((server.path / "run").glob(".*.tmp"))), "nothing is left of what it tries anew"
    assert process.log.read_text().count("no state is written for `h2d-patch status`: [Errno 27] File too large") == 1
    process("resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))")
    assert eventually(lambda: server.states()[0]["switches"] == {"our-model": False})


def test_a_process_killed_while_it_writes_leaves_nothing_half_written(server: Server) -> None:
    endless = """
    import threading
    def write():
        while True:
            process.current.writer._written = None
            process.current.writer.write()
    threading.Thread(target=write, daemon=True).start()
    """
    for _ in range(3):
        with server.running() as running:
            running(BARE)
            running(endless)
            time.sleep(0.2)
    assert len(server.states()) == 3
    shown = server.status("status")
    assert shown.stdout.count("(dead; ") == 3 and shown.stderr == ""


def test_50_000_switches_under_load_lose_no_call_and_leave_a_small_file(server: Server, process: Running) -> None:
    load = """
    import threading
    done, stop, wrong = [0] * 3, threading.Event(), []
    def work(at):
        x = torch.arange(3.0)
        while not stop.is_set():
            if model.forward(x).tolist() != [1.0, 2.0, 3.0]:
                wrong.append(at)
            done[at] += 1
    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads: thread.start()
    before = process.current.patches[-2].site.calls
    for number in range(50_000):
        process.current.switches["our-model"].turn(number % 2 == 1)
    """
    process(load)
    name = process.state()["server"]
    deadline = time.monotonic() + 3
    for on in itertools.cycle((False, True)):
        turn(server, on, "our-model", "another", name=name)
        if time.monotonic() > deadline:
            break
    turn(server, True, name=name)
    assert path_of(server.path / "run", name).stat().st_size < 1000
    assert eventually(lambda: process.state()["switches"] == {"our-model": True})
    done, wrong, calls = process("stop.set()\n_ = [done, wrong, process.current.patches[-2].site.calls - before]")
    assert wrong == [] and min(done) > 100 and 0 < calls < sum(done)
    assert process(CALLS) == 1
    state = process.state()["targets"][-2]
    assert (state["verdict"], state["fallbacks"]) == ("active", 0)


@pytest.mark.parametrize("flags", ["-O", "-OO", "-S", "-I", "-ISO"])
def test_a_python_started_with_other_flags_patches_and_switches_alike(server: Server, flags: str) -> None:
    import sysconfig

    where = [str(server.path), str(ROOT), sysconfig.get_paths()["purelib"]]
    with server.running(flags, prelude=f"sys.path[:0] = {where}\n") as running:
        assert running(START) == 1
        assert running.state()["targets"][-2]["verdict"] == "active"
        assert switch(server, "all", "off")[0] == 0
        assert running(CALLS) == 0


OTHER_VERSION = {
    "h2d_patch/__init__.py": '__version__ = "0.0.9"\n',
    "h2d_patch/plugin.py": "def register():\n    raise RuntimeError('the other version')\n",
    "h2d_patch-0.0.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: h2d-patch\nVersion: 0.0.9\n",
    "h2d_patch-0.0.9.dist-info/entry_points.txt": "[vllm.general_plugins]\nh2d_patch = h2d_patch.plugin:register\n",
}
# As vLLM does: each entry point of the group, called.
LOAD_PLUGINS = """
import importlib.metadata
found = [entry for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if entry.name == "h2d_patch"]
for entry in found:
    entry.load()()
from h2d_patch import process
_ = [len(found), process.current.state()["h2d_patch"], process.current.state()["switches"]]
"""


def test_of_two_versions_that_are_installed_one_runs_and_both_leave_the_other_s_files_alone(server: Server) -> None:
    from h2d_patch import __version__

    for name, text in OTHER_VERSION.items():
        path = server.path / "other" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # What a server of another version, in the same run directory, has written.
    (server.path / "run").mkdir(mode=0o700)
    (server.path / "run/state-x-1.json").write_text('{"schema": 1, "pid": 1, "role": "worker", "targets": []}')
    (server.path / "run/control-old.json").write_text("{}")
    with server.running(prelude=f"sys.path.append({str(server.path / 'other')!r})\n") as running:
        number, version, switches = running(LOAD_PLUGINS)
        assert number >= 1 and version == __version__ and switches == {"our-model": True}
        assert running.log.read_text() == ""
        status, text = switch(server, "all", "off")
        assert status == 0 and str(running.pid) in text
        assert "state-x-1.json: schema: found 1; expected 2, a file of this version" in text
        shown = server.status("status")
        assert shown.returncode == 2 and "state-x-1.json: schema: found 1; expected 2" in shown.stderr
        assert str(running.pid) in shown.stdout
    assert (server.path / "run/state-x-1.json").exists() and (server.path / "run/control-old.json").exists()


def test_what_an_operator_s_commands_import_is_neither_torch_nor_vllm(server: Server) -> None:
    server.prelude = "import importlib, pkgutil, sys\nimport h2d_patch.operate as package\n"
    script = """
    names = [found.name for found in pkgutil.iter_modules(package.__path__)]
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
    print(len(names), *{"torch", "vllm", "numpy", "matplotlib"} & sys.modules.keys())
    """
    number, *heavy = server.run(script).stdout.split()
    assert int(number) >= 3 and heavy == []


def test_a_change_right_after_a_look_is_seen_at_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = control.signature

    def coarse(directory: Path, server: str) -> tuple[int, ...]:  # up to Linux 6.12; the steps are 1 to 10 ms
        *others, modified, changed = exact(directory, server)
        return *others, modified // 10**8 * 10**8, changed // 10**8 * 10**8

    tmp_path.chmod(0o700)
    switches = {"a": Switch()}
    told = Switches(tmp_path, "name", switches)
    monkeypatch.setattr(control, "signature", coarse)
    for _ in range(20):
        update(tmp_path, "name", lambda control: control.turned(["a"], False))
        path = path_of(tmp_path, "name")
        text = path.read_text()
        told.poll(None)
        assert not switches["a"].on
        path.write_text(text.replace("false", "true "))
        told.poll(None)
        assert switches["a"].on


def test_a_server_into_which_no_fix_got_is_named_with_the_reason(server: Server) -> None:
    with server.running(H2D_PATCH="our-model", H2D_PATCH_SERVER="well") as well:
        well(BARE)
        with server.running(H2D_PATCH="nonsense", H2D_PATCH_SERVER="chat") as running:
            running(BARE)
            status, text = switch(server, "all", "off", "--server", "chat")
            assert status == 2
            assert "switch: server chat has no fix in: nothing is patched: H2D_PATCH: unknown fix 'nonsense'" in text
            status, text = switch(server, "all", "off", "--server", "another")
            assert status == 2 and "no live server another" in text and "there: chat, well (" in text
            assert switch(server, "all", "off")[0] == 0
            well.end()
            status, text = switch(server, "all", "off")
            assert status == 2 and "server chat has no fix in: nothing is patched: " in text


def test_a_file_in_place_of_a_damaged_one_keeps_what_was_switched_before(server: Server) -> None:
    name = "chat"
    with server.running(H2D_PATCH="our-model,kv-swap", H2D_PATCH_SERVER=name) as running:
        running(BARE)
        assert switch(server, "our-model", "off")[0] == 0
        path_of(server.path / "run", name).write_text("{")
        assert eventually(lambda: server.states()[0]["control"])
        status, text = switch(server, "kv-swap", "off")
        assert status == 0 and "replaced, with what the processes had, since no process could read it" in text
        both_off = {"our-model": False, "kv-swap": False}
        assert running.state()["switches"] == both_off and running.state()["control"] is None
        with server.running(H2D_PATCH="our-model,kv-swap", H2D_PATCH_SERVER=name) as later:
            later(BARE)
            assert later.state()["switches"] == both_off


def test_a_run_directory_that_is_repaired_is_no_longer_said_to_be_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    told = Switches(tmp_path, "name", {"a": Switch()})
    assert told.poll(None) and told.problem is not None and "(mode 0777)" in told.problem
    assert not told.poll(None) and told.problem
    tmp_path.chmod(0o700)
    assert told.poll(None) and told.problem is None
    assert not told.poll(None)


def test_a_refused_file_that_is_removed_is_no_longer_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    told = Switches(tmp_path, "name", {"a": Switch()})
    path_of(tmp_path, "name").write_text("{")
    assert told.poll(None) and told.problem
    path_of(tmp_path, "name").unlink()
    assert told.poll(None) and told.problem is None
    assert not told.poll(None)
