"""A real vLLM server on the CPU with the fixes in: same tokens, honest status, and nothing that can stop it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import EVERY_FIX, QUESTIONS, Answers, Live, Server, ServerDied, answers, under_load
from harness import IMAGE_FIXES as RAN

from h2d_patch.operate.control import Control, update
from h2d_patch.report.state import read_states

pytestmark = pytest.mark.live

ALL = {"H2D_PATCH": "1", "H2D_PATCH_STRICT": "1"}
IN_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


def status(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.h2d_patch("status", "--json").stdout)
    return found


def workers(server: Server) -> list[dict[str, Any]]:
    return sorted((p for p in status(server)["processes"] if p["role"] == "worker"), key=lambda p: p["rank"])


def eventually(holds: Callable[[], bool], seconds: float = 10, every: float = 0.3) -> bool:
    """Each process writes its state about once a second."""
    deadline = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < deadline:
        time.sleep(every)
    return true


def target(process: dict[str, Any], fix: str) -> dict[str, Any]:
    """The target of `fix` that runs on this server: of several, the one that was called."""
    found: dict[str, Any] = max((t for t in process["targets"] if t["fix"] == fix), key=lambda t: t["calls"])
    return found


def ran(process: dict[str, Any]) -> set[str]:
    """The fixes that are active in the process and have run there."""
    return {t["fix"] for t in process["targets"] if t["verdict"] == "active" and t["calls"] > 0}


@pytest.fixture(scope="module")
def patched(live: Live) -> Iterator[Server]:
    """A server with every fix, its processes spawned, and no cache that would spare it the inspector."""
    environ = {**ALL, "H2D_PATCH": EVERY_FIX, "VLLM_CACHE_ROOT": str(live.folder / "new-cache")}
    with live.server("patched", environ, fork=False) as server:
        yield server


def test_a_server_without_the_variable_writes_nothing(live: Live, reference: Answers) -> None:
    assert not live.run_dir("reference").exists()
    assert "h2d_patch" not in (live.folder / "reference.log").read_text().replace("Loading plugin h2d_patch", "")


def test_the_questions_have_answers_that_differ(reference: Answers) -> None:
    assert len({tuple(tokens) for tokens in reference.values()}) == len(QUESTIONS)


def test_all_fixes_give_the_same_tokens(patched: Server, reference: Answers) -> None:
    assert answers(patched) == reference


def test_doctor_and_the_metrics_tell_of_a_server_that_is_well(patched: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    patched.ask(*QUESTIONS["image"])
    assert eventually(lambda: set(RAN) <= ran(workers(patched)[0]))
    said = json.loads(patched.h2d_patch("doctor", "--json").stdout)
    assert said["exit_status"] == 0, said
    worse = {one["about"] for one in said["findings"] if one["level"] != "ok"}
    assert not worse & {"plugin", "versions", "vLLM", "variables", "run directory", "processes", "fixes"}, said
    shown = " ".join(one["found"] for one in said["findings"])
    assert all(f"{fix}: active, called" in shown for fix in RAN)
    families = list(text_string_to_metric_families(patched.h2d_patch("status", "--prometheus").stdout))
    samples = [sample for family in families for sample in family.samples]
    for fix in RAN:
        of = [sample for sample in samples if sample.labels.get("fix") == fix and sample.labels["role"] == "worker"]
        assert max(one.value for one in of if one.name == "h2d_patch_calls_total") > 0
        assert max(one.value for one in of if one.name == "h2d_patch_host_seconds_count") > 0
        assert {one.labels["verdict"] for one in of if one.name == "h2d_patch_verdict_info"} == {"active"}
    assert {one.labels["role"] for one in samples if one.name == "h2d_patch_process_info"} >= {"worker", "engine-core"}


def test_the_worker_ran_each_fix_that_an_image_goes_through(live: Live, patched: Server) -> None:
    patched.ask(*QUESTIONS["image"])
    assert eventually(lambda: set(RAN) <= ran(workers(patched)[0])), patched.h2d_patch("status").stdout
    (worker,) = workers(patched)
    assert worker["rank"] == 0
    assert worker["vllm"] == live.release
    assert worker["alive"]
    assert all(target(worker, fix)["selftest_ms"] < 100 for fix in RAN)


def test_every_process_of_the_server_is_shown(patched: Server) -> None:
    shown = status(patched)["processes"]
    assert sorted(p["role"] for p in shown if p["alive"]) == ["api-server", "engine-core", "worker"]
    assert [p["pid"] for p in shown if p["role"] == "api-server"] == [patched.process.pid]
    assert all(t["verdict"] not in ("refused", "failed") for p in shown for t in p["targets"])
    done = patched.h2d_patch("status")
    assert done.returncode == 0
    assert "mrope-positions" in done.stdout


def test_the_inspector_that_has_ended_is_shown_until_cleaned(patched: Server) -> None:
    assert [p["role"] for p in status(patched)["processes"] if not p["alive"]] == ["inspector"]
    assert patched.h2d_patch("status", "--clean").returncode == 0
    assert all(p["alive"] for p in status(patched)["processes"])


def test_a_fix_is_off_in_every_process_within_two_seconds_and_on_again(patched: Server) -> None:
    pids = {str(process["pid"]) for process in status(patched)["processes"] if process["alive"]}
    for word in ("off", "on"):
        done = patched.h2d_patch("switch", "mrope-positions", word, "--json")
        printed = json.loads(done.stdout)
        assert done.returncode == 0 and printed["took_s"] < 2, done.stdout
        assert {str(answer["pid"]) for answer in printed["answers"]} == pids
        calls = target(workers(patched)[0], "mrope-positions")["calls"]
        patched.ask(*QUESTIONS["image"])
        time.sleep(1.5)  # a state is at most as old
        assert (target(workers(patched)[0], "mrope-positions")["calls"] > calls) is (word == "on")


FLIPS = 100


def test_100_switch_flips_of_each_fix_under_load_fail_no_request_and_change_no_token(
    patched: Server, live: Live, reference: Answers
) -> None:
    (name,) = {process["server"] for process in status(patched)["processes"] if process["alive"]}
    fixes = EVERY_FIX.split(",")
    flipped = dict.fromkeys(fixes, 0)

    def shown() -> list[dict[str, bool]]:
        return [state.content["switches"] for state in read_states(live.run_dir("patched")) if state.alive]

    before = {fix: target(workers(patched)[0], fix)["calls"] for fix in RAN}
    with under_load(patched, reference) as load:
        for step in range(FLIPS + 1):  # one half of the fixes is on while the other is off

            def change(control: Control, step: int = step) -> Control:
                for fix in fixes[0::2] if step < FLIPS else ():
                    control = control.turned([fix], step % 2 == 1)
                for fix in fixes[1::2] if step else ():
                    control = control.turned([fix], step % 2 == 0)
                return control

            were = shown()[0]
            update(live.run_dir("patched"), name, change)
            wanted = {**were, **{one.fix: one.on for one in change(Control(name)).switches}}
            assert eventually(lambda wanted=wanted: all(found == wanted for found in shown()), every=0.05)  # type: ignore[misc]
            for fix in fixes:
                flipped[fix] += wanted[fix] != were[fix]
    assert flipped == dict.fromkeys(fixes, FLIPS)
    assert load.wrong == [] and load.right > FLIPS / 2
    assert eventually(lambda: all(target(workers(patched)[0], fix)["calls"] > before[fix] for fix in RAN))
    done = patched.h2d_patch("status")
    assert done.returncode == 0, done.stdout


def test_an_a_b_of_20_slices_sees_no_difference_where_both_arms_are_the_original(
    patched: Server, live: Live, reference: Answers
) -> None:
    report = live.folder / "ab.json"
    command = ("ab", "mrope-positions", "--same", "--slice", "2s", "--slices", "20", "--json", str(report))
    with under_load(patched, reference) as load:
        for _ in range(2):  # one report in twenty shows a difference that is none; a busy machine loses slices
            done = patched.h2d_patch(*command, "--url", f"http://127.0.0.1:{patched.port}")
            found = json.loads(report.read_text())
            differences = [name for name, ratio in found["on_against_off"].items() if ratio and ratio["differs"]]
            if not differences and found["pairs"] >= 8:
                break
    assert done.returncode == 0 and not differences, done.stdout
    assert set(found["on_against_off"]) == {"requests_per_s", "tokens_per_s", "ttft_s", "itl_s", "host_time_s"}
    assert found["pairs"] >= 8 and all(arm["count"] > 100 for arm in found["arms"].values()), done.stdout
    assert load.wrong == [] and load.right > 100
    assert all(process["ab"] is None for process in status(patched)["processes"] if process["alive"])


def test_an_a_b_runs_both_arms_and_every_answer_is_right(patched: Server, live: Live, reference: Answers) -> None:
    report = live.folder / "ab.json"
    before = target(workers(patched)[0], "mrope-positions")["arms"]
    with under_load(patched, reference) as load:
        done = patched.h2d_patch("ab", "mrope-positions", "--slice", "1s", "--slices", "8", "--json", str(report))
    found = json.loads(report.read_text())
    assert done.returncode == 0 and "only host times are measured" in done.stdout, done.stdout + done.stderr
    kept = [one for one in found["measured"] if not one["left_out"]]
    assert len(kept) >= 6 and all(one["calls"] for one in kept)
    after = target(workers(patched)[0], "mrope-positions")
    for arm, on in (("on", True), ("off", False)):
        counted = sum(one["calls"] for one in kept if one["on"] is on)
        assert 0 < counted <= after["arms"][arm]["count"] - before[arm]["count"]
    assert after["verdict"] == "active"
    assert load.wrong == [] and load.right > 20


@pytest.mark.parametrize("fix", RAN)
def test_a_corrupted_copy_changes_the_tokens(fix: str, patched: Server, live: Live, reference: Answers) -> None:
    orders = live.orders("patched")
    orders.write_text(f"corrupt {RAN[fix]}")
    try:
        assert patched.ask(*QUESTIONS["image"]) != reference["image"]
    finally:
        orders.unlink()
    assert patched.ask(*QUESTIONS["image"]) == reference["image"]


@pytest.mark.parametrize("fix", RAN)  # after the tests above: what has failed stays off in that process
def test_an_error_of_ours_costs_the_fix_and_not_the_request(
    fix: str, patched: Server, live: Live, reference: Answers
) -> None:
    orders = live.orders("patched")
    orders.write_text(f"raise-once {RAN[fix]}")
    try:
        assert patched.ask(*QUESTIONS["image"]) == reference["image"]
    finally:
        orders.unlink()
    assert patched.ask(*QUESTIONS["image"]) == reference["image"]
    assert eventually(lambda: target(workers(patched)[0], fix)["verdict"] == "failed")
    failed = target(workers(patched)[0], fix)
    assert "RuntimeError: raised on purpose by h2d_probe" in failed["reason"]
    assert failed["fallbacks"] == 1
    assert patched.h2d_patch("status").returncode == 1


def test_forked_processes_and_both_workers_of_tensor_parallelism(live: Live, reference: Answers) -> None:
    with live.server("two", ALL, ("--tensor-parallel-size", "2")) as server:
        assert answers(server) == reference
        assert eventually(lambda: [set(RAN) <= ran(p) for p in workers(server)] == [True, True])
        assert [p["rank"] for p in workers(server)] == [0, 1]
        assert len({p["pid"] for p in status(server)["processes"]}) == len(status(server)["processes"])
        assert len({p["server"] for p in status(server)["processes"]}) == 1
        for rank, on in (("1", [True, False]), ("0", [False, False])):
            done = server.h2d_patch("switch", "vision-rope", "off", "--rank", rank)
            assert done.returncode == 0, done.stdout + done.stderr
            assert [p["switches"]["vision-rope"] for p in workers(server)] == on
            assert answers(server) == reference
        assert [p["switches"]["vision-rope"] for p in status(server)["processes"] if p["role"] != "worker"] == [
            True
        ] * 2


def test_a_worker_inside_the_engine_core_is_shown_as_the_worker(live: Live, reference: Answers) -> None:
    with live.server("inside", ALL, IN_PROCESS) as server:
        assert answers(server) == reference
        assert eventually(lambda: [set(RAN) <= ran(p) for p in workers(server)] == [True])


def test_one_fix_can_be_left_out(live: Live, reference: Answers) -> None:
    with live.server("but-one", {**ALL, "H2D_PATCH": "all,-vision-rope"}) as server:
        assert answers(server) == reference
        assert eventually(lambda: ran(workers(server)[0]) == set(RAN) - {"vision-rope"})
        assert target(workers(server)[0], "vision-rope")["verdict"] == "off"


def test_vllm_plugins_naming_others_leaves_us_out_and_status_says_so(live: Live, reference: Answers) -> None:
    with live.server("left-out", {**ALL, "VLLM_PLUGINS": "h2d_probe"}) as server:
        assert answers(server) == reference
        assert status(server)["processes"] == []
        for command in ("status", "check"):
            assert "VLLM_PLUGINS='h2d_probe' leaves h2d_patch out" in server.h2d_patch(command).stdout
        # Also to an operator whose own shell has other settings than the server.
        assert (
            "VLLM_PLUGINS='h2d_probe' leaves h2d_patch out"
            in server.h2d_patch("status", VLLM_PLUGINS="h2d_patch").stdout
        )


def test_a_wrong_setting_leaves_the_server_running_without_us(live: Live, reference: Answers) -> None:
    with live.server("nonsense", {"H2D_PATCH": "nonsense"}) as server:
        assert answers(server) == reference
        assert all(p["targets"] == [] for p in status_despite(server)["processes"])
        assert len({p["server"] for p in status_despite(server)["processes"]}) == 1
        done = server.h2d_patch("status")
    assert done.returncode == 1
    assert "unknown fix 'nonsense'" in done.stdout
    assert "unknown fix 'nonsense'" in (live.folder / "nonsense.log").read_text()


def status_despite(server: Server) -> dict[str, Any]:
    """What `status` says to an operator whose own shell has no wrong setting."""
    done = server.h2d_patch("status", "--json", H2D_PATCH="1")
    assert done.returncode == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_wrong_setting_under_strict_keeps_the_server_from_starting(live: Live) -> None:
    environ = {"H2D_PATCH": "nonsense", "H2D_PATCH_STRICT": "1"}
    with pytest.raises(ServerDied, match="unknown fix 'nonsense'"), live.server("strict", environ):
        pass
