"""Device profiles: what is chosen, and which files may not be used."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from h2d_patch.copies import profile_file
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice, default
from h2d_patch.copies.profile_file import (
    SHIPPED,
    Cell,
    Key,
    Measured,
    Places,
    Unusable,
    driver_version,
    file_name,
    find,
    kernels_hash,
    link_of,
    load,
    save,
    usable,
)

KEY = Key("NVIDIA H200", "PCIe 5 x16", "580.159.04", "13.0", "3.6.0", "0123456789abcdef")
ALL = (DRIVER, BULK, TRITON)


def cell(gpu_to_cpu=False, nbytes=8192, blocks=1024, **rates):
    names = {"driver": Choice(DRIVER)}
    gbps = {names.get(name) or Choice(name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))): rate
            for name, rate in rates.items()}  # fmt: skip
    return Cell(gpu_to_cpu, nbytes, blocks, gbps)


@pytest.fixture
def measured():
    cells = [cell(direction, nbytes, blocks, driver=3.0, bulk4=40.0 + nbytes / 1024, bulk8=50.0, triton16=44.0)
             for direction in (False, True) for nbytes in (4096, 8192) for blocks in (64, 4096)]  # fmt: skip
    return Measured(KEY, cells, {"time": "now"})


@pytest.fixture
def stored(tmp_path, measured):
    path = tmp_path / "profiles" / file_name(KEY.gpu)
    save(path, measured)
    return path


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({"driver": 48.6, "bulk8": 50.0}, "driver"),
        ({"driver": 48.4, "bulk8": 50.0}, "bulk 8"),
        ({"bulk4": 48.6, "bulk8": 50.0, "bulk16": 49.0}, "bulk 4"),
        ({"bulk8": 49.9, "triton8": 50.0, "triton64": 50.1}, "triton 8"),
        ({"driver": 1.0}, "driver"),
    ],
)
def test_the_fewest_sms_that_are_nearly_as_fast_are_chosen(rates, best):
    assert str(cell(**rates).best()) == best


def test_a_path_that_this_process_lacks_is_never_chosen(measured):
    assert measured.profile(ALL).choose(False, 8192, 4096) == Choice(BULK, 8)
    assert measured.profile((DRIVER, TRITON)).choose(False, 8192, 4096) == Choice(TRITON, 16)
    assert measured.profile((DRIVER,)).choose(False, 8192, 4096) == Choice(DRIVER)


def test_what_lies_between_goes_with_the_nearer_by_ratio():
    cells = [cell(d, n, b, bulk4=float(n == 4096) + 1, bulk8=float(n == 16384) + 1, bulk16=float(b == 4096) * 9 + 1)
             for d in (False, True) for n in (4096, 16384) for b in (64, 4096)]  # fmt: skip
    profile = Measured(KEY, cells, {}).profile(ALL)
    assert [profile.choose(False, n, 64).programs for n in (1, 4096, 8191, 8193, 16384, 1e9)] == [4, 4, 4, 8, 8, 8]
    assert [profile.choose(True, 4096, n).programs for n in (1, 511, 513, 10**6)] == [4, 4, 16, 16]


def test_a_cell_that_was_not_measured_has_the_choice_of_its_nearest():
    cells = [cell(False, 4096, 64, bulk4=1.0), cell(False, 65536, 4096, driver=1.0), cell(False, 4096, 4096, bulk8=1.0)]
    profile = Measured(KEY, cells, {}).profile(ALL)
    assert profile.choose(False, 65536, 64) == Choice(DRIVER)
    # In a direction of which nothing is known, what holds everywhere.
    assert profile.choose(True, 4096, 4096) == default(ALL).choose(True, 4096, 4096)


def test_without_a_cell_for_its_paths_a_process_has_what_holds_everywhere():
    profile = Measured(KEY, [cell(bulk8=1.0)], {}).profile((DRIVER, TRITON))
    assert profile.choose(False, 8192, 4096) == default((DRIVER, TRITON)).choose(False, 8192, 4096)


def test_a_lookup_takes_less_than_2_microseconds():
    from h2d_patch.copies.calibrate import COUNTS, SIZES

    cells = [cell(d, n, b, driver=1.0, bulk8=2.0) for d in (False, True) for n in SIZES for b in COUNTS]
    choose = Measured(KEY, cells, {}).profile(ALL).choose
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            choose(True, 8008.5, 3000)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 2e-6


def test_a_file_says_back_what_was_stored(stored, measured):
    assert load(stored) == measured
    assert [path.name for path in stored.parent.iterdir()] == ["nvidia-h200.json"]


def test_a_file_is_written_whole_or_not_at_all(stored, measured, monkeypatch):
    before = stored.read_text()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(stored, replace(measured, cells=measured.cells[:1]))
    assert stored.read_text() == before and len(list(stored.parent.iterdir())) == 1


@pytest.mark.parametrize("name", [field.name for field in fields(Key)])
def test_a_profile_of_another_device_or_version_is_not_used_and_the_key_is_named(stored, name):
    other = replace(KEY, **{name: "another"})
    with pytest.raises(Unusable) as refused:
        usable(stored, other)
    said = str(refused.value)
    assert str(stored) in said and f"{name}: expected 'another'" in said and repr(getattr(KEY, name)) in said


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(schema=2), "schema: expected 1, found 2"),
        (lambda c: c.update(schema=True), "schema: expected 1, found True"),
        (lambda c: c.pop("schema"), "schema: expected 1, found None"),
        (lambda c: c.pop("key"), "key.gpu: expected a text, found None"),
        (lambda c: c["key"].update(driver=580), "key.driver: expected a text, found 580"),
        (lambda c: c.update(cells={}), "cells: expected a list"),
        (lambda c: c.update(cells=[]), "cells: expected a list"),
        (lambda c: c["cells"].append(7), "cells[8].gpu_to_cpu"),
        (lambda c: c["cells"][2].update(bytes=-1), "cells[2].bytes: expected a positive whole number, found -1"),
        (lambda c: c["cells"][2].update(blocks=1.5), "cells[2].blocks"),
        (lambda c: c["cells"][2].update(blocks=10**30), "cells[2].blocks"),
        (lambda c: c["cells"].append(c["cells"][0]), "cells[8]: expected each cell once"),
        (lambda c: c["cells"][1].update(gbps={}), "cells[1].gbps: expected GB/s by path"),
        (lambda c: c["cells"][1]["gbps"].update({"dma 4": 1}), "found 'dma 4'"),
        (lambda c: c["cells"][1]["gbps"].update({"bulk 0": 1}), "found 'bulk 0'"),
        (lambda c: c["cells"][1]["gbps"].update({"bulk 99999": 1}), "found 'bulk 99999'"),
        (lambda c: c["cells"][1]["gbps"].update({"driver 3": 1}), "found 'driver 3'"),
        (lambda c: c["cells"][1]["gbps"].update({"driver": "3"}), "gbps['driver']: expected a positive number"),
        (lambda c: c["cells"][1]["gbps"].update({"driver": 0}), "gbps['driver']: expected a positive number"),
        (lambda c: c["cells"][1]["gbps"].update({"driver": 10**400}), "gbps['driver']: expected a positive number"),
        (lambda c: c["cells"][1]["gbps"].update({"driver": float("nan")}), "damaged or half written: NaN"),
    ],
)
def test_a_damaged_profile_says_where(stored, change, says):
    changed(stored, change)
    with pytest.raises(Unusable) as refused:
        load(stored)
    assert str(stored) in str(refused.value) and says in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "no JSON", "[" * 100_000, "[]", "null", '"text"', "\0"])
def test_what_is_no_profile_is_refused(stored, text):
    stored.write_text(text)
    with pytest.raises(Unusable, match=str(stored)):
        load(stored)


def test_every_half_of_a_profile_is_refused(stored):
    text = stored.read_text().rstrip()
    for length in range(0, len(text), 37):
        stored.write_text(text[:length])
        with pytest.raises(Unusable):
            load(stored)


def test_bytes_that_are_no_text_and_a_directory_are_refused(stored, tmp_path):
    stored.write_bytes(b"\xff\xfe")
    with pytest.raises(Unusable):
        load(stored)
    with pytest.raises(Unusable):
        load(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_is_refused_and_does_not_hold_up_a_server(tmp_path, make):
    path = tmp_path / "profile.json"
    make(path)
    _, _, (reason,) = find(KEY, Places(path), tmp_path / "none")
    assert str(path) in reason and "not a regular file" in reason


def test_a_file_of_any_size_is_not_read_whole(stored):
    with stored.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unusable, match="larger than"):
        load(stored)


def test_a_grid_that_would_take_minutes_to_fill_is_refused(stored):
    changed(stored, lambda c: c.update(cells=[{**c["cells"][0], "bytes": n, "blocks": n} for n in range(1, 2000)]))
    with pytest.raises(Unusable, match="at most 32 different bytes, found 1999"):
        load(stored)


def test_a_name_that_is_a_book_is_not_said_whole(stored):
    changed(stored, lambda c: c["key"].update(gpu="x" * 100_000))
    with pytest.raises(Unusable) as refused:
        usable(stored, KEY)
    assert len(str(refused.value)) < 500


def test_the_stored_one_comes_first_then_the_shipped_one(stored, measured, tmp_path):
    shipped = tmp_path / "shipped"
    save(shipped / "x.json", replace(measured, key=replace(KEY, driver="570", cuda="12.8", triton="3.2")))
    places = Places(None, stored.parent)
    found, words, reasons = find(KEY, places, shipped)
    assert found == measured and str(stored) in words and not reasons
    stored.unlink()
    found, words, reasons = find(KEY, places, shipped)
    assert found is not None and "shipped for NVIDIA H200" in words and not reasons
    assert find(KEY, Places(), shipped)[0] is not None
    for name in ("gpu", "link", "kernels"):
        assert find(replace(KEY, **{name: "other"}), places, shipped) == (None, "", [])


def test_a_shipped_one_is_trusted_like_the_package_s_code_whoever_may_write_there(measured, tmp_path):
    shipped = tmp_path / "shipped"
    save(shipped / "x.json", measured)
    (shipped / "x.json").chmod(0o664)  # as installed under a umask of 002
    shipped.chmod(0o775)
    assert find(KEY, Places(), shipped)[0] == measured
    named = Places(shipped / "x.json")
    assert find(KEY, named, tmp_path / "none")[0] is None


def test_why_a_stored_one_is_not_used_is_said_and_the_shipped_one_is(stored, measured, tmp_path):
    shipped = tmp_path / "shipped"
    save(shipped / "x.json", measured)
    newer = replace(KEY, driver="590.1")
    found, words, (reason,) = find(newer, Places(None, stored.parent), shipped)
    assert found is not None and "shipped" in words
    assert "driver: expected '590.1'" in reason and "h2d-patch calibrate" in reason


def test_a_profile_that_was_named_must_be_there(stored, tmp_path):
    named = tmp_path / "named.json"
    found, _, (reason,) = find(KEY, Places(named, stored.parent), tmp_path / "none")
    assert found is None and str(named) in reason and "H2D_PATCH_PROFILE" in reason
    named.write_text(stored.read_text())
    assert find(KEY, Places(named, None), tmp_path / "none")[2] == []


def test_a_damaged_shipped_one_is_passed_over(measured, tmp_path):
    (tmp_path / "a.json").write_text("{")
    save(tmp_path / "b.json", measured)
    assert find(KEY, Places(), tmp_path)[0] == measured


def test_what_is_shipped_is_of_these_kernels():
    for path in SHIPPED.glob("*.json"):
        assert load(path).key.kernels == kernels_hash(), path.name


def test_the_hash_changes_with_the_kernels(monkeypatch, tmp_path):
    before = kernels_hash()
    for name in profile_file._KERNELS:
        (tmp_path / name).write_bytes(profile_file.SHIPPED.with_name(name).read_bytes())
    monkeypatch.setattr(profile_file, "__file__", str(tmp_path / "profile_file.py"))
    assert kernels_hash() == before
    with (tmp_path / profile_file._KERNELS[0]).open("ab") as file:
        file.write(b"\n")
    assert kernels_hash() != before


def pci(tmp_path, device_speed="32.0 GT/s PCIe", port_speed="32.0 GT/s PCIe", width="16"):
    device = tmp_path / "port" / "0000:18:00.0"
    device.mkdir(parents=True)
    (device / "max_link_speed").write_text(f"{device_speed}\n")
    (device / "current_link_width").write_text(f"{width}\n")
    if port_speed:
        (device.parent / "max_link_speed").write_text(f"{port_speed}\n")
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / device.name).symlink_to(device)
    return devices


@pytest.mark.parametrize(
    ("speeds", "link"),
    [
        ({}, "PCIe 5 x16"),
        ({"port_speed": "16.0 GT/s PCIe"}, "PCIe 4 x16"),
        ({"port_speed": None, "width": "8"}, "PCIe 5 x8"),
        ({"device_speed": "Unknown"}, "unknown"),
        ({"width": "0"}, "unknown"),
        ({"width": "Unknown"}, "unknown"),
    ],
)
def test_the_link_is_what_its_slower_end_can_do(tmp_path, speeds, link):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x18, pci_device_id=0)
    assert link_of(properties, pci(tmp_path, **speeds)) == link
    assert link_of(SimpleNamespace(), tmp_path) == "unknown"
    assert link_of(SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0), tmp_path) == "unknown"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  gcc 11.4.0\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("GCC version: 11.4.0\n", "unknown"),
    ],
)
def test_the_version_of_the_driver_is_read(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "none") == "unknown"
