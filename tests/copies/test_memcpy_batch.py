"""The driver's batch of copies, with a driver of Python's."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import cuda  # noqa: E402


class Library:
    """What `Driver` asks of libcuda. Copies at once."""

    def __init__(self, has_batch=True, code=0):
        self.asked = []
        self.calls = []
        self.has_batch = has_batch
        self.code = code
        self._batch = cuda._BATCH(self.batch)
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    def cuGetProcAddress_v2(self, name, address, version, flags, status):
        self.asked.append((name, version))
        address._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value if self.has_batch else None
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_OF_A_TEST"
        return 0

    def batch(self, dst, src, nbytes, count, attributes, firsts, number, failed, stream):
        numbers = [list((ctypes.c_uint64 * count).from_address(at)) for at in (dst, src, nbytes)]
        attribute = cuda._CopyAttributes.from_address(attributes)
        first = ctypes.c_size_t.from_address(firsts).value
        self.calls.append((count, attribute.order, attribute.flags, first, number, stream))
        ctypes.c_size_t.from_address(failed).value = 1
        if not self.code:
            for write, read, size in zip(*numbers, strict=True):
                ctypes.memmove(write, read, size)
        return self.code


def driver(monkeypatch, library):
    monkeypatch.setattr(cuda, "_driver", lambda: library)
    return cuda.Driver()


def blocks():
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    src = torch.tensor([source.data_ptr(), source.data_ptr() + 32])
    dst = torch.tensor([target.data_ptr() + 8, target.data_ptr() + 40])
    return source, target, src, dst, torch.tensor([16, 8])


def test_a_batch_arrives_with_the_attributes_of_vllm_s(monkeypatch):
    library = Library()
    source, target, src, dst, sizes = blocks()
    made = driver(monkeypatch, library)
    for order in (cuda.IN_STREAM_ORDER, cuda.ANY_ORDER):
        made.memcpy_batch(dst.data_ptr(), src.data_ptr(), sizes.data_ptr(), 2, order, 7)
    assert library.calls == [(2, 1, 0, 0, 1, 7), (2, 3, 0, 0, 1, 7)]
    assert library.asked == [(b"cuMemcpyBatchAsync", 12080)]
    assert torch.equal(target[8:24], source[:16]) and torch.equal(target[40:48], source[32:40])
    assert int(target.count_nonzero()) == 23  # all of them but source[0]


def test_attributes_are_as_long_as_the_driver_s():
    assert ctypes.sizeof(cuda._CopyAttributes) == 24


def test_a_driver_without_a_batch_says_so(monkeypatch):
    made = driver(monkeypatch, Library(has_batch=False))
    assert not made.has_memcpy_batch()
    with pytest.raises(OSError, match="the driver has no cuMemcpyBatchAsync; it came with CUDA 12.8"):
        made.memcpy_batch(0, 0, 0, 0, 1, 7)


def test_a_driver_that_cannot_be_asked_has_none(monkeypatch):
    library = Library()
    monkeypatch.delattr(Library, "cuGetProcAddress_v2")
    assert not driver(monkeypatch, library).has_memcpy_batch()


def test_the_copy_that_failed_is_named(monkeypatch):
    _, _, src, dst, sizes = blocks()
    made = driver(monkeypatch, Library(code=1))
    with pytest.raises(OSError, match="cuMemcpyBatchAsync, copy 1 of 2: CUDA_ERROR_OF_A_TEST"):
        made.memcpy_batch(dst.data_ptr(), src.data_ptr(), sizes.data_ptr(), 2, 1, 7)
