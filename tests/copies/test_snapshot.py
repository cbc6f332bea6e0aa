"""Copies within host memory give the same bytes however they are made."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import native, snapshot  # noqa: E402
from h2d_patch.copies.staging import CpuLink, Ring  # noqa: E402


def ring(nbytes: int) -> Ring:
    return Ring(torch.empty(nbytes, dtype=torch.uint8), CpuLink(), torch.device("cpu"))


@pytest.fixture(params=["C", "Python"])
def ways(request, library, monkeypatch):
    monkeypatch.setattr(native, "loaded", library if request.param == "C" else None)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64 << 10, (64 << 10) + 1, (1 << 20) + 1, (9 << 20) + 17])
def test_every_byte_arrives_and_none_beside_it(ways, nbytes):
    source = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 128, dtype=torch.uint8)
    snapshot.copy_bytes(target.data_ptr() + 64, source.data_ptr() + 64, nbytes)
    assert torch.equal(target[64 : 64 + nbytes], source[64 : 64 + nbytes])
    assert not target[:64].any() and not target[64 + nbytes :].any()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12),
        torch.arange(3 * 4097).view(3, 4097)[:, :1000],
        torch.arange(200 * 9).view(200, 9)[:, :5],
        torch.arange(1500 * 300).view(1500, 300)[:, 7:207],
        torch.arange(60).view(3, 20)[:, ::2],
        torch.arange(60).view(3, 20).t()[:, 1:],
        torch.arange(60).view(3, 4, 5)[:, 1:, :2],
        torch.arange(3 * 8).view(3, 8)[:1, :3],
        torch.tensor(5),
    ],
)
def test_a_snapshot_has_the_source_s_values_in_the_layout_that_was_asked_for(ways, source):
    piece = ring(4 << 20).reserve(source.nbytes + 64)
    strides = source.contiguous().stride()
    snapshot.snapshot(source, piece, strides, 64)
    assert torch.equal(piece.view(source.dtype, source.shape, strides, 64), source)


def test_parts_lie_one_behind_the_other(ways):
    parts = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 700_000, 3)]
    target = torch.zeros(700_004, dtype=torch.uint8)
    snapshot.gather(target.data_ptr(), [part.data_ptr() for part in parts], [part.numel() for part in parts])
    assert torch.equal(target, torch.cat(parts))


@pytest.mark.parametrize(
    ("rows", "columns", "itself"), [(3, 5, True), (8, 1, True), (9, 2, False), (9, 8, None), (5000, 3, False)]
)
def test_many_rows_are_torch_s_where_that_takes_less_time(ways, rows, columns, itself):
    source = torch.zeros(rows, columns + 1, dtype=torch.int64)[:, :columns]
    expected = native.loaded is not None if itself is None else itself
    assert (snapshot.dense_rows(source) is not None) == expected
