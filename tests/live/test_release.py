"""What every release must do with all fixes in: serve, give the same tokens, and have the verdicts that `check` foretold.

Every release of tools/live_releases.json runs this (`make live RELEASE=…`); the default one runs test_server.py too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import EVERY_FIX, IMAGE_FIXES, QUESTIONS, Answers, Live, Server, answers

from h2d_patch.manifest import load

pytestmark = pytest.mark.live

Targets = list[dict[str, Any]]
# What a server says of a target that `check` cannot say: whether its module is loaded, and what its worker is.
RUNNING = {"active": "applies", "pending": None}


@pytest.fixture(scope="module")
def server(live: Live) -> Iterator[Server]:
    """All fixes, also those that are off by default; no cache that would spare it the inspector."""
    environ = {
        "H2D_PATCH": EVERY_FIX,
        "H2D_PATCH_STRICT": "1",
        "VLLM_CACHE_ROOT": str(live.folder / "release-cache"),
    }
    with live.server("release", environ, fork=False) as running:
        yield running


@pytest.fixture(scope="module")
def given(server: Server) -> Answers:
    return answers(server)


@pytest.fixture(scope="module")
def foretold(server: Server) -> Targets:
    targets: Targets = json.loads(server.h2d_patch("check", "--json").stdout)["targets"]
    return targets


@pytest.fixture(scope="module")
def processes(server: Server, given: Answers) -> Targets:
    """The live ones, by role, after the questions have been answered."""
    time.sleep(2)  # each writes its state about once a second
    found: Targets = json.loads(server.h2d_patch("status", "--json").stdout)["processes"]
    return sorted((process for process in found if process["alive"]), key=lambda process: str(process["role"]))


def for_images(foretold: Targets) -> set[str]:
    """The fixes that an image request runs through in a worker of this release, whatever their form there."""
    return {t["fix"] for t in foretold if t["verdict"] == "applies" and "XD-RoPE" not in t["reason"]} & set(IMAGE_FIXES)


def copied_with(worker: dict[str, Any]) -> dict[str, set[str]]:
    """The copy functions that were called for each fix."""
    found: dict[str, set[str]] = {}
    for (fix, target), state in zip(load().targets(), worker["targets"], strict=True):
        if state["calls"]:
            puts = {target.replace.put} if target.replace else set()
            found.setdefault(fix.id, set()).update(puts, *(rewrite.put.called() for rewrite in target.rewrites))
    return found


def test_the_tokens_are_those_without_the_fixes_and_depend_on_the_question(given: Answers, reference: Answers) -> None:
    assert given == reference
    assert len({tuple(tokens) for tokens in given.values()}) == len(QUESTIONS)


def test_check_knows_every_source_of_the_release(foretold: Targets) -> None:
    assert {target["verdict"] for target in foretold} <= {"applies", "upstream", "absent"}


def test_every_process_has_the_verdicts_that_check_foretold(foretold: Targets, processes: Targets) -> None:
    for process in processes:
        for one, other in zip(foretold, process["targets"], strict=True):
            assert (one["fix"], one["function"]) == (other["fix"], other["function"])
            if "this worker runs" in other["reason"]:
                assert one["verdict"] == "applies" and other["verdict"] == "absent"
            else:
                assert RUNNING.get(other["verdict"], other["verdict"]) in (one["verdict"], None), (one, other)


def test_the_worker_ran_every_fix_that_an_image_goes_through(live: Live, foretold: Targets, processes: Targets) -> None:
    roles = ["api-server", "worker"] if live.recipe.worker_inside else ["api-server", "engine-core", "worker"]
    assert [process["role"] for process in processes] == roles
    worker = processes[-1]
    assert worker["rank"] == 0
    assert worker["vllm"] == live.release
    called = {t["fix"] for t in worker["targets"] if t["calls"]}
    assert for_images(foretold) <= called <= {t["fix"] for t in foretold if t["verdict"] == "applies"}
    assert not any(t["fallbacks"] for t in worker["targets"])


def test_a_copy_that_went_wrong_would_change_the_tokens(
    live: Live, server: Server, foretold: Targets, processes: Targets, reference: Answers
) -> None:
    orders = live.orders("release")
    used = copied_with(processes[-1])
    for fix in sorted(for_images(foretold)):
        others = set().union(*(names for other, names in used.items() if other != fix))
        for name in (
            used[fix] - others
        ):  # what others share is more than this fix, and offsets turned around end a server
            orders.write_text(f"corrupt {name}")
            try:
                assert server.ask(*QUESTIONS["image"]) != reference["image"], (fix, name)
            finally:
                orders.unlink()
    assert server.ask(*QUESTIONS["image"]) == reference["image"]
