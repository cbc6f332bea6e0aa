"""bench/soak.py finds what is wrong, with the CPU in the device's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import soak  # noqa: E402

from h2d_patch import copies  # noqa: E402

SMALL = ["--device", "cpu", "--copies", "400", "--largest-mb", "1", "--pinned-mb", "8", "--threads", "2"]


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        path = tmp_path / "soak.json"
        status = soak.main([*SMALL, *arguments, "--json", str(path)])
        return status, json.loads(path.read_text())

    return run


def replaced(monkeypatch, name, function):
    monkeypatch.setattr(getattr(copies, name), "bind", lambda ledger: function)


def test_right_copies_pass_and_all_are_counted(run):
    status, result = run("--pinned-mb", "4", "8")
    assert status == 0 and result["complete"] is True
    for one, bound in zip(result["runs"], (4 << 20, 8 << 20), strict=True):
        assert one["bound_bytes"] == bound and one["copies"] == sum(one["copies_of_each_thread"]) == 400
        assert set(one["calls"]) == set(soak.FUNCTIONS)
        assert one["outcomes"]["staged"] > 200 and one["tensors"] > 400
        assert one["wrong"] == one["errors"] == []


def test_copies_that_return_before_queued_work_has_ended_are_counted(run, monkeypatch):
    monkeypatch.setattr("h2d_patch.bench.device._Passed.query", lambda event: False)
    status, result = run()
    assert status == 0 and 100 < result["runs"][0]["returned_with_work_still_queued_ahead"] <= 400


def test_a_seed_gives_the_same_copies(run):
    first, again, other = (run("--seed", seed)[1]["runs"][0] for seed in ("3", "3", "4"))
    assert (first["bytes"], first["calls"]) == (again["bytes"], again["calls"])
    assert first["bytes"] != other["bytes"]


def test_fallbacks_are_counted_by_reason_and_right(run):
    status, result = run("--pinned-mb", "1", "--largest-mb", "4")
    assert status == 0
    assert result["runs"][0]["outcomes"]["fallback: larger than the staging region"] > 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("to_device", lambda source, *args: source.to(*args)),  # hands back the live source
        ("nested_to_device", lambda tensors, device: tensors),
        ("cat_to_device", lambda tensors, *args, dim: torch.cat(tensors[::-1], dim=dim).to(*args)),
    ],
)
def test_a_copy_that_takes_no_snapshot_or_mixes_parts_up_is_found(name, function, run, monkeypatch, capsys):
    replaced(monkeypatch, name, function)
    status, result = run("--seed", "5")
    assert status == 1 and result["complete"] is False
    wrong = result["runs"][0]["wrong"][0]
    assert wrong.startswith("seed 5, 8 MB, thread ") and f": {name}" in wrong and wrong in capsys.readouterr().err


def test_other_strides_than_the_originals_are_found(run, monkeypatch):
    replaced(monkeypatch, "to_device", lambda source, *args: source.to(*args, copy=True).contiguous())
    status, result = run()
    assert status == 1 and "strides" in result["runs"][0]["wrong"][0]


def test_a_write_beside_the_destination_is_found(run, monkeypatch):
    def careless(target, source):
        target.copy_(source)
        whole = target if target._base is None else target._base
        if not target.is_contiguous():
            whole[-1:].fill_(0)
        return target

    replaced(monkeypatch, "copy_h2d", careless)
    status, result = run()
    assert status == 1 and "copy_h2d" in result["runs"][0]["wrong"][0]


def test_an_error_ends_it(run, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("a broken copy")

    replaced(monkeypatch, "copy_h2d", broken)
    status, result = run()
    assert status == 1 and "a broken copy" in result["runs"][0]["errors"][0]
    assert "a broken copy" in capsys.readouterr().err


def test_pinned_memory_taken_while_warm_is_exit_status_1(run, monkeypatch):
    taken = iter(range(100))
    monkeypatch.setattr(soak.Cpu, "pinned_allocations", lambda device: next(taken))
    status, result = run()
    assert status == 1 and result["runs"][0]["torch_pinned_allocations"] == 1


def test_an_overwritten_source_differs_in_every_element():
    from h2d_patch.bench.device import Cpu

    pools = soak.Pools(Cpu(), 1 << 12, 0)
    for (dtype, _), values in pools.host.items():
        memory = values[:64].clone().view(torch.uint8)
        tensor = memory.view(dtype)
        before = soak.bits(tensor).clone()
        soak.Source(tensor, memory, tensor, False, True, "").overwrite()
        assert bool((soak.bits(tensor) != before).all()), dtype
