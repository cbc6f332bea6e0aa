"""The metrics are what the states say, in a form that Prometheus reads, and never go backwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_states import arm, put, state, target

from h2d_patch.cli import main
from h2d_patch.operate.prometheus import FAMILIES, RECENT_S, exposition, scrape
from h2d_patch.patching.arms import BOUNDS_S
from h2d_patch.report.state import read_states

parser = pytest.importorskip("prometheus_client.parser")

ROOT = Path(__file__).resolve().parents[2]

Key = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def read(text: str) -> dict[Key, float]:
    """Every sample; each stands once, under a family that is announced with a type and a help text."""
    found: dict[Key, float] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.type != "unknown" and family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    assert len(found) == len([line for line in text.splitlines() if not line.startswith("#")])
    return found


def value(found: dict[Key, float], name: str, **labels: str) -> float:
    """The only sample of that name with these labels among its own."""
    matching = [v for (n, have), v in found.items() if n == name and set(labels.items()) <= set(have)]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def has(found: dict[Key, float], name: str, **labels: str) -> bool:
    return any(n == name and set(labels.items()) <= set(have) for n, have in found)


def busy(**more: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"calls": 10, "fallbacks": 3, "bytes": 4096, "paths": {"bulk 8": 6, "driver batch": 1}}
    about["fallback_reasons"] = {"staging is full": 2, "no swap kernel: OSError: /home/someone/x.so": 1}
    about["arms"] = {"on": arm(1, 2, 3, seconds=0.25), "off": arm()}
    return target(**{**about, **more})


def test_all_that_a_state_counts_is_there(run_dir: Path) -> None:
    put(run_dir, state(busy(), device={"staging_bytes": 256 << 20, "profile": "of /x.json"}))
    found = read(scrape(run_dir))
    own = {"server": "here-1-1", "role": "worker", "rank": "0", "pid": str(os.getpid())}
    of = {**own, "fix": "kv-swap", "function": "x:Y.z"}
    assert value(found, "h2d_patch_calls_total", **of) == 10
    assert value(found, "h2d_patch_bytes_total", **of) == 4096
    assert value(found, "h2d_patch_path_calls_total", path="bulk 8", **of) == 6
    assert value(found, "h2d_patch_fallbacks_total", **of) == 3
    assert value(found, "h2d_patch_fallback_reasons_total", reason="staging is full", **of) == 2
    assert value(found, "h2d_patch_fallback_reasons_total", reason="no swap kernel", **of) == 1
    assert value(found, "h2d_patch_verdict_info", verdict="active", **of) == 1
    assert value(found, "h2d_patch_pinned_bytes", **own) == 256 << 20
    assert value(found, "h2d_patch_process_patched", **own) == 1
    assert value(found, "h2d_patch_control_refused", **own) == 0
    assert value(found, "h2d_patch_process_info", vllm="0.22.1", **own) == 1
    assert [value(found, f"h2d_patch_{name}") for name in ("processes", "states_unreadable", "run_dir_refused")] == [
        1,
        0,
        0,
    ]


def test_every_family_that_is_announced_can_be_had(run_dir: Path) -> None:
    put(run_dir, state(busy(), device={"staging_bytes": 1}))
    text = scrape(run_dir)
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == set(FAMILIES)


def test_a_histogram_is_cumulative_and_of_each_arm_that_ran(run_dir: Path) -> None:
    last = [0] * (len(BOUNDS_S) - 2)
    arms = {"on": arm(1, 2, *last, 4, seconds=2.5), "off": arm()}
    put(run_dir, state(busy(arms=arms), busy(function="vllm.x:other", arms={**arms, "off": arm(5, seconds=1.0)})))
    found = read(scrape(run_dir))
    name, of = "h2d_patch_host_seconds", {"function": "x:Y.z", "arm": "on"}
    bounds = sorted(
        (dict(have)["le"], v)
        for (n, have), v in found.items()
        if n == f"{name}_bucket" and set(of.items()) <= set(have)
    )
    assert {float(bound) for bound, _ in bounds} == {float(f"{bound:.9g}") for bound in BOUNDS_S} | {float("inf")}
    by_bound = sorted((float(bound), count) for bound, count in bounds)
    assert [count for _, count in by_bound] == [1, 3, *[3.0] * len(last), 7] and [count for _, count in by_bound][
        -2
    ] == 3 + 0
    assert (value(found, f"{name}_sum", **of), value(found, f"{name}_count", **of)) == (2.5, 7)
    assert not has(found, f"{name}_count", function="x:Y.z", arm="off")
    assert value(found, f"{name}_count", function="x:other", arm="off") == 5


def test_what_status_leaves_out_is_left_out(run_dir: Path) -> None:
    rows = [
        target("pending", function="vllm.x:a"),
        target("upstream", function="vllm.x:b"),
        target("absent", function="vllm.x:c"),
    ]
    rows += [target("off", reason="not selected by H2D_PATCH", function="vllm.x:d")]
    rows += [
        target("absent", reason="does not apply: another runner", function="vllm.x:e"),
        target("refused", function="vllm.x:f"),
    ]
    put(run_dir, state(*rows))
    found = read(scrape(run_dir))
    shown = {dict(have)["function"] for name, have in found if name == "h2d_patch_verdict_info"}
    assert shown == {"x:e", "x:f"} and not has(found, "h2d_patch_calls_total")


def test_two_targets_of_one_function_are_one_and_the_worse_verdict_shows(run_dir: Path) -> None:
    put(run_dir, state(busy(calls=2), target("refused"), busy(calls=3)))
    found = read(scrape(run_dir))
    assert value(found, "h2d_patch_calls_total") == 5
    assert value(found, "h2d_patch_verdict_info") == 1 and has(found, "h2d_patch_verdict_info", verdict="refused")


def test_a_switched_off_fix_goes_on_showing_what_it_had_counted(run_dir: Path) -> None:
    put(run_dir, state(busy(verdict="off", reason="switched off")))
    found = read(scrape(run_dir))
    assert value(found, "h2d_patch_calls_total") == 10 and value(found, "h2d_patch_verdict_info", verdict="off") == 1


def test_no_counter_goes_backwards_when_a_process_dies_and_is_cleaned_away(
    run_dir: Path, child: subprocess.Popen[bytes]
) -> None:
    """Each process has series of its own, so that the rate of their sum has no fall in it."""
    put(run_dir, state(busy(calls=100)), state(busy(calls=40), pid=child.pid))
    before = read(scrape(run_dir))
    child.kill()
    child.wait()
    dead = read(scrape(run_dir))
    assert value(dead, "h2d_patch_calls_total", pid=str(child.pid)) == 40, "its last words can still be scraped"
    assert value(dead, "h2d_patch_processes") == 1 and not has(dead, "h2d_patch_verdict_info", pid=str(child.pid))
    later = read(scrape(run_dir, time.time() + RECENT_S))
    assert not has(later, "h2d_patch_calls_total", pid=str(child.pid)), "labels do not pile up"
    (run_dir / "state-x-1.json").unlink()
    cleaned = read(scrape(run_dir))
    for then, now in ((before, dead), (dead, later), (later, cleaned)):
        for key in then.keys() & now.keys():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert now[key] >= then[key], key


def test_two_processes_of_one_role_and_rank_are_told_apart(run_dir: Path, child: subprocess.Popen[bytes]) -> None:
    put(
        run_dir,
        state(busy(calls=1), role="api-server", rank=None),
        state(busy(calls=2), role="api-server", rank=None, pid=child.pid),
    )
    found = read(scrape(run_dir))
    assert {value(found, "h2d_patch_calls_total", pid=str(pid), rank="") for pid in (os.getpid(), child.pid)} == {1, 2}


def test_reasons_of_any_number_and_length_make_few_short_labels(run_dir: Path) -> None:
    reasons = {f"reason {number}": 1 for number in range(100)} | {
        "/a/path": 1,
        "x" * 500: 1,
        "staging is full (3 of 5)": 1,
    }
    put(run_dir, state(busy(fallbacks=103, fallback_reasons=reasons, paths={"p" * 500: 1})))
    found = read(scrape(run_dir))
    kinds = {dict(have)["reason"]: v for (name, have), v in found.items() if name == "h2d_patch_fallback_reasons_total"}
    assert len(kinds) <= 21 and sum(kinds.values()) == 103 and max(map(len, kinds)) <= 80 and "other" in kinds
    assert max(len(v) for _, have in found for _, v in have) <= 80


def test_no_path_and_nothing_that_a_reason_quotes_is_shown(run_dir: Path) -> None:
    secret = "s3cret prompt /home/someone"
    rows = [
        busy(reason=secret, fallback_reasons={f"an error: {secret}": 1, secret: 1}),
        target("failed", reason=secret),
    ]
    put(run_dir, state(*rows, device={"notes": [secret], "profile": f"of {secret}"}, control=secret))
    put(run_dir, state(*rows, device={"notes": [secret], "profile": f"of {secret}"}, control=secret, error=None))
    text = scrape(run_dir)
    assert "s3cret" not in text and "/home" not in text and str(run_dir) not in text
    assert value(read(text), "h2d_patch_control_refused") == 1


def test_whatever_stands_in_a_name_the_text_stays_readable(run_dir: Path) -> None:
    put(run_dir, state(busy(fix='a"b\\c\nd', function="m\ud800:f}", paths={"ü µ": 1})))
    found = read(scrape(run_dir))
    assert value(found, "h2d_patch_calls_total", fix='a"b\\c\nd') == 10 and has(
        found, "h2d_patch_path_calls_total", path="ü µ"
    )


DAMAGED: dict[str, Any] = {
    "half written": '{"schema": 2, "pi',
    "of another version": {"schema": 1},
    "a list": [1],
    "text for a number": state(busy(calls=7, fallback_reasons={"x": "many"})),
    "no number": state(busy(arms={"on": arm(seconds=float("nan")), "off": arm()})),
    "below zero": state(busy(bytes=-1)),
    "too few buckets": state(busy(arms={"on": {"count": 1, "seconds": 0.1, "buckets": [1]}, "off": arm()})),
    "an arm that is none": state(busy(arms={"on": 3})),
    "an unknown verdict": state(target("splendid")),
    "a rank that is none": state(busy(), rank="first"),
    "staging in words": state(busy(), device={"staging_bytes": "much"}),
    "paths in a number": state(busy(paths={"bulk 8": None})),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_state_is_a_metric_and_the_others_are_shown(
    run_dir: Path, what: str, child: subprocess.Popen[bytes]
) -> None:
    content = DAMAGED[what]
    put(run_dir, state(busy(calls=40), pid=child.pid))
    (run_dir / "state-x-bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
    found = read(scrape(run_dir))
    assert value(found, "h2d_patch_states_unreadable") == 1 and value(found, "h2d_patch_processes") == 1
    assert value(found, "h2d_patch_calls_total") == 40


def test_a_run_directory_that_is_refused_or_not_there_is_a_metric(run_dir: Path) -> None:
    assert value(read(scrape(run_dir / "none")), "h2d_patch_run_dir_refused") == 0
    run_dir.chmod(0o777)
    assert value(read(scrape(run_dir)), "h2d_patch_run_dir_refused") == 1


def test_a_process_in_which_nothing_is_patched_is_a_metric(run_dir: Path) -> None:
    script = "from h2d_patch.plugin import register\nregister()\nprint('refused', flush=True)\ninput()"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "H2D_PATCH": "unknown", "H2D_PATCH_RUN_DIR": str(run_dir)}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"refused\n"
        found = read(scrape(run_dir))
        assert value(found, "h2d_patch_process_patched") == value(found, "h2d_patch_states_unreadable") == 0
        assert value(found, "h2d_patch_processes") == 1
    finally:
        process.communicate(b"\n")


def test_status_prints_the_same(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("H2D_PATCH_RUN_DIR", str(run_dir))
    put(run_dir, state(busy()))
    assert main(["status", "--prometheus"]) == 0
    printed = capsys.readouterr().out
    assert printed == exposition(read_states(run_dir), 0, 0, time.time())
    (run_dir / "state-x-bad.json").write_text("{")
    assert main(["status", "--prometheus"]) == 2
    assert value(read(capsys.readouterr().out), "h2d_patch_states_unreadable") == 1
    run_dir.chmod(0o777)
    assert main(["status", "--prometheus"]) == 2
    said = capsys.readouterr()
    assert said.out == scrape(run_dir) and value(read(said.out), "h2d_patch_run_dir_refused") == 1
    assert "can be written by others (mode 0777)" in said.err
    assert main(["status", "--prometheus", "--json"]) == 2
