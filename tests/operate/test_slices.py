"""The slices of an A/B are the same for all who know its start, and each process keeps what its arms did in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from h2d_patch import cli
from h2d_patch.operate.alternation import CLOCK_SET, LATE, Alternation, Clock
from h2d_patch.operate.control import Control
from h2d_patch.operate.slices import Slices, is_on
from h2d_patch.patching.switch import Site, Switch
from h2d_patch.settings import ConfigurationError, Settings

START = 1_800_000_000.0


def test_each_pair_has_both_arms_and_their_order_favours_none() -> None:
    arms = [is_on(number) for number in range(64)]
    assert all(arms[i] != arms[i + 1] for i in range(0, 64, 2))
    # Neither a drift nor one that grows is found in one arm more than in the other.
    for power in (0, 1, 2, 3):
        sums = [sum(n**power for n in range(64) if arms[n] is on) for on in (True, False)]
        assert sums[0] == sums[1]


def test_a_moment_belongs_to_one_slice() -> None:
    slices = Slices("a", 3.0, START, None, 0.5)
    assert [slices.number(START + s) for s in (-0.1, 0, 2.999, 3, 300)] == [-1, 0, 0, 1, 100]
    assert (slices.begin(2), slices.settled(2)) == (START + 6, START + 6.5)


@pytest.mark.parametrize(
    ("text", "slice_s", "settle_s"),
    [("kv-swap:30s", 30, 6), ("kv-swap : 2m:5s", 120, 5), ("kv-swap:1500ms:0s", 1.5, 0), ("a:2.5s", 2.5, 0.5)],
)
def test_an_a_b_may_be_asked_for_in_the_environment(text: str, slice_s: float, settle_s: float) -> None:
    slices = Settings.from_environ({"H2D_PATCH_AB": text}).ab
    assert slices is not None and slices.fix == text.split(":")[0].strip()
    assert (slices.slice_s, slices.settle_s, slices.start, slices.stop) == (slice_s, pytest.approx(settle_s), 0, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv-swap", "expected a fix id and the length of a slice"),
        ("kv-swap:30", "expected a fix id and the length of a slice"),
        (":30s", "expected a fix id"),
        ("kv-swap:30s:1s:1s", "expected a fix id"),
        ("kv-swap:-3s", "expected a fix id"),
        ("kv-swap:0.5s", "slices of 0.5 s; expected 1 to 3600 s"),
        ("kv-swap:100m", "slices of 6000.0 s; expected 1 to 3600 s"),
        ("kv-swap:10s:10s", "10.0 s of each slice left out; expected less than a slice"),
    ],
)
def test_an_a_b_that_cannot_be_is_refused_and_the_variable_named(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Settings.from_environ({"H2D_PATCH_AB": text})
    assert str(error.value).startswith(f"H2D_PATCH_AB={text!r}") and says in str(error.value)


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0.0), ("0", 0.0), ("1500ms", 1.5), ("2m", 120.0), ("7", 7.0)])
def test_what_is_left_out_of_a_slice_may_be_given_with_a_unit_or_without_and_be_nothing(
    text: str, seconds: float
) -> None:
    assert cli._parser().parse_args(["ab", "kv-swap", "--settle", text]).settle == seconds


def test_an_a_b_of_a_fix_that_is_not_there_or_not_in_is_refused() -> None:
    settings = Settings.from_environ({"H2D_PATCH_AB": "kv-swap:30s"})
    settings.check_ab({"kv-swap"}, {"kv-swap"})
    with pytest.raises(ConfigurationError, match="unknown fix 'kv-swap'; expected one of: a, b"):
        settings.check_ab({"b", "a"})
    with pytest.raises(ConfigurationError, match="'kv-swap' is not selected"):
        settings.check_ab({"kv-swap"}, set())


class MadeClock(Clock):
    """Time passes only where something waits for it; `at` calls something once it has come."""

    def __init__(self, wall: float = START) -> None:
        self.now = wall
        self.ticks = 0.0
        self.at: list[tuple[float, Callable[[], None]]] = []
        self.wall = lambda: self.now  # type: ignore[method-assign]
        self.monotonic = lambda: self.ticks  # type: ignore[method-assign]

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        self.now += seconds
        self.ticks += seconds
        for moment, call in [due for due in self.at if due[0] <= self.now]:
            self.at.remove((moment, call))
            call()
        return stopped.is_set()


class Made:
    """A process with one fix in one function, which is called once each look at the clock."""

    def __init__(self, slices: Slices | None, own: Slices | None = None, on: bool = True) -> None:
        self.site = Site()
        self.switch = Switch(on)
        self.switch.add(self.site)
        self.clock = MadeClock()
        self.seen: list[tuple[float, bool]] = []
        self.control = Control("s", ab=slices)
        wait = self.clock.wait

        def called(stopped: threading.Event, seconds: float) -> bool:
            self.seen.append((self.clock.now - START, self.site.on))
            if self.site.on:
                self.site.ended_on(self.site.now(), None)
            else:
                self.site.ended_off(self.site.if_timed(), None)
            return wait(stopped, seconds)

        self.clock.wait = called  # type: ignore[method-assign]
        self.alternation = Alternation(
            {"a": self.switch}, lambda _: [("m:f", self.site)], {"a": on}, own, clock=self.clock
        )

    def run(self) -> dict:  # type: ignore[type-arg]
        self.alternation.follow(self.control)
        deadline = time.monotonic() + 20
        while (state := self.alternation.state()) is not None and state["ended"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert state is not None
        return state


def slices(number: int = 4, **more: float) -> Slices:
    return Slices("a", 2.0, START + 1, START + 1 + 2 * number, **{"settle_s": 0.5, **more})


@pytest.mark.parametrize("before", [True, False])
def test_arms_alternate_with_the_slices_and_the_switch_is_as_it_was_afterwards(before: bool) -> None:
    made = Made(slices(), on=before)
    state = made.run()
    assert {on for at, on in made.seen if at < 1} == {before}
    assert all(on is is_on(int((at - 1) // 2)) for at, on in made.seen if at >= 1)
    assert [(one["number"], one["on"], one["left_out"]) for one in state["slices"]] == [
        (n, is_on(n), "") for n in range(4)
    ]
    # Of the eight looks at the clock in a slice, the first two lie in what is left out.
    assert [one["count"] for one in state["slices"]] == [6, 6, 6, 6]
    assert all(sum(arm["buckets"]) == arm["count"] == 12 for arm in state["arms"].values())
    assert made.site.on is before and not made.site.timed and state["on"] is None


def test_with_the_same_arm_in_both_the_fix_stays_off_and_is_still_timed() -> None:
    made = Made(replace(slices(), same=True))
    state = made.run()
    assert not any(on for at, on in made.seen if at >= 1)
    assert [arm["count"] for arm in state["arms"].values()] == [12, 12] and made.site.on


@pytest.mark.parametrize("jump", [-3600.0, -1.0, 0.7, 3.0])
def test_a_slice_in_which_the_clock_is_set_is_left_out(jump: float) -> None:
    made = Made(Slices("a", 2.0, START - 5000, START + 20, 0.5))

    def set_clock() -> None:
        made.clock.now += jump

    made.clock.at.append((START + 9, set_clock))
    made.alternation.follow(made.control)
    deadline = time.monotonic() + 20
    while made.clock.ticks < 15 and time.monotonic() < deadline:
        time.sleep(0.002)
    made.control = Control("s")
    made.alternation._end(made.alternation._run)  # type: ignore[arg-type]
    state = made.alternation.state()
    assert state is not None and state["left_out"][CLOCK_SET] == 1
    assert {one["left_out"] for one in state["slices"]} <= {"", CLOCK_SET, LATE}
    kept = [one for one in state["slices"] if not one["left_out"]]
    assert kept and all(one["count"] == 6 for one in kept)


def test_a_process_that_comes_late_leaves_its_first_slice_out() -> None:
    made = Made(Slices("a", 2.0, START - 1, START + 5, 0.5))
    assert [one["left_out"] for one in made.run()["slices"]] == [LATE, "", ""]


def test_whoever_measures_may_put_the_end_off_and_take_the_a_b_back() -> None:
    made = Made(slices(2))
    made.clock.at.append((START + 3, lambda: made.alternation.follow(Control("s", ab=slices(3))) and None))
    assert [one["number"] for one in made.run()["slices"]] == [0, 1, 2]
    made = Made(replace(slices(), stop=None))
    made.clock.at.append((START + 4.1, lambda: made.alternation.follow(Control("s")) and None))
    made.alternation.follow(made.control)
    deadline = time.monotonic() + 20
    while made.alternation.state() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert made.site.on and not made.site.timed


def test_a_child_that_was_forked_within_a_slice_begins_anew() -> None:
    made = Made(replace(slices(), stop=None))
    go_on = threading.Event()
    made.clock.at.append((START + 1.5, lambda: go_on.wait(30) and None))
    made.alternation.follow(made.control)
    deadline = time.monotonic() + 20
    while made.clock.now < START + 1.5 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not made.site.on and made.site.timed
    run = made.alternation._run
    assert run is not None
    made.alternation.renew()  # the thread of the parent's stands still, as in a child there would be none
    assert made.site.on and not made.site.timed and made.alternation.state() is None
    run.stopped.set()
    go_on.set()


def test_a_switch_by_hand_outlasts_the_environment_s_a_b() -> None:
    own = Slices("a", 2.0, 0.0, None, 0.5)
    made = Made(None, own)
    assert made.alternation._asked(None) == made.alternation._asked(made.control) == own
    by_hand = made.control.turned(["a"], False)
    assert made.alternation._asked(by_hand) is None
    assert made.alternation._asked(Control("s", ab=slices())) == slices()
    assert Control("s", ab=slices()).turned(["a"], False).ab is None
    assert Control("s", ab=slices()).turned(["b"], False).ab == slices()


def test_a_fix_that_is_not_in_this_process_has_no_a_b() -> None:
    made = Made(replace(slices(), fix="b"))
    assert not made.alternation.follow(made.control) and made.alternation.state() is None


def test_an_error_of_ours_ends_the_a_b_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = Made(slices())
    made.switch.turn = lambda on: made.alternation  # type: ignore[method-assign]
    turns = iter([1, 0])

    def turn(on: bool) -> None:
        1 / next(turns, 1)

    made.switch.turn = turn  # type: ignore[method-assign]
    assert "ZeroDivisionError" in made.run()["ended"] and "ZeroDivisionError" in caplog.text
