"""The swaps of real releases, their own functions rewritten and run on the CPU with everything around them pretended."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import types
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from h2d_patch.copies import EXPORTS, forced_staging, swap_kernel
from h2d_patch.manifest import load
from h2d_patch.patching.install import build_rewrite
from h2d_patch.patching.rewrite import ModuleSource, Refused
from h2d_patch.patching.switch import Site

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch

pytestmark = [
    pytest.mark.releases,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
BLOCKS, BYTES = 12, 64


class Pretended(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None, "is_rocm": staticmethod(lambda: False)})
        setattr(self, name, made)
        return made


@pytest.fixture
def release_module(monkeypatch):
    """A module of a release, run where everything it imports of vLLM is pretended."""

    def make(release, name):
        path = fetch(release) / (name.replace(".", "/") + ".py")
        parts = [
            line.split()[1] for line in path.read_text().splitlines() if line.startswith(("from vllm", "import vllm"))
        ]
        for part in parts:
            for end in range(1, part.count(".") + 2):
                package = ".".join(part.split(".")[:end])
                monkeypatch.setitem(sys.modules, package, Pretended(package))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))


@contextlib.contextmanager
def rewritten(module, qualname, name):
    """The site of the fix in `qualname`, whose targets all but one do not know this release's function."""
    function = module
    for part in qualname.split("."):
        function = getattr(function, part)
    source = ModuleSource(Path(module.__file__).read_bytes(), module.__file__)
    definition = source.definition_of(qualname, function.__code__)
    site, installs = Site(), []
    for target in (t for _, t in load().targets() if t.function == f"{name}:{qualname}"):
        for put in {put for rewrite in target.rewrites for put in rewrite.put.called()}:
            site.bind(put, EXPORTS[put].bind(site))
        with contextlib.suppress(Refused):
            installs.append(build_rewrite(function, source, definition, target.rewrites, site))
    (install,) = installs
    undo = install()
    yield site
    undo()


def filled(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def swap(src, dst, *size_and_mapping):
    *size, mapping = size_and_mapping
    nbytes = size[0] if size else src.stride(0)
    for i, j in mapping.tolist():
        ctypes.memmove(dst.data_ptr() + j * nbytes, src.data_ptr() + i * nbytes, nbytes)


def transfer(module, src, dst, ids):
    """Runs `transfer_async` of whatever class that release has for it, from the CPU "to the GPU"."""
    event = SimpleNamespace(record=lambda stream: None)
    stream = SimpleNamespace(wait_event=lambda event: None)
    halved = [t.dim() == 3 for t in src]
    more = {
        "block_size_factor": 1,
        "src_block_size_factor": 1,
        "dst_block_size_factor": 1,
        "h2d_stream": stream,
        "events_pool": [event],
        "transfer_events": {},
        "_transfer_events": {},
        "_transfers": deque(),
        "_stream_pool": [stream],
        "_event_pool": [event, event],
        "gpu_to_cpu": False,
        "kv_dim_before_num_blocks": halved,
        "block_size_in_bytes": [BYTES for _ in src],
        "tensor_block_size_in_bytes": [BYTES for _ in src],
        "total_block_size_in_bytes": BYTES,
        "group_block_size_in_bytes": [BYTES],
        "transfer_type": ("CPU", "GPU"),
        **dict.fromkeys(("src_tensors", "cpu_tensors"), src),
        **dict.fromkeys(("dst_tensors", "gpu_tensors"), dst),
    }
    kind = getattr(module, "SingleDirectionOffloadingHandler", None) or module.CpuGpuOffloadingHandler
    handler = object.__new__(kind)
    vars(handler).update(more)
    specs = []
    for name, column in zip(("CPULoadStoreSpec", "GPULoadStoreSpec"), ids, strict=True):
        spec_class = getattr(module, "BlockIDsLoadStoreSpec", None) or getattr(module, name)
        spec = spec_class()
        spec.block_ids = column
        specs.append(spec)
    return handler.transfer_async(7, tuple(specs))


@pytest.mark.parametrize(
    ("release", "kind"),
    [
        ("0.11.0", "CpuGpuOffloadingHandler"),
        ("0.14.1", "SingleDirectionOffloadingHandler"),
        ("0.19.1", "SingleDirectionOffloadingHandler"),
    ],
)
def test_a_transfer_of_many_tensors_is_one_batch_and_off_it_is_the_loop(release_module, monkeypatch, release, kind):
    name = "vllm.v1.kv_offload.worker.cpu_gpu"
    module = release_module(release, name)
    calls = []
    module.ops.swap_blocks = staticmethod(lambda *call: (calls.append(call), swap(*call)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    torch.manual_seed(0)
    halves = [] if release == "0.19.1" else [filled(2, BLOCKS, BYTES)]
    src = [filled(BLOCKS, BYTES), filled(BLOCKS, BYTES), *halves]
    empty = [torch.zeros_like(t) for t in src]
    ids = [np.random.default_rng(column).permutation(BLOCKS)[:9] for column in range(2)]
    with rewritten(module, f"{kind}.transfer_async", name) as site:
        found = {}
        for on in (False, True):
            site.on = on
            dst = [t.clone() for t in empty]
            with forced_staging(1 << 16):
                assert transfer(module, src, dst, ids) is True
            found[on] = dst
        assert len(calls) == 2 + 2 * len(halves) and (site.calls, site.fallbacks) == (1, 0), site.reasons
        assert all(torch.equal(one, other) for one, other in zip(found[False], found[True], strict=True))
        assert not torch.equal(found[True][0], empty[0])
        # Without staging the loop runs through the other arm.
        site.on = True
        dst = [t.clone() for t in empty]
        transfer(module, src, dst, ids)
        assert len(calls) == 2 * (2 + 2 * len(halves))
        assert all(torch.equal(one, other) for one, other in zip(found[False], dst, strict=True))


@pytest.mark.parametrize("release", ["0.19.1", "0.22.1", "0.33.0"])
def test_a_batch_of_addresses_is_ours_under_every_name_and_off_it_is_the_driver_s(release_module, release):
    name = "vllm.v1.simple_kv_offload.cuda_mem_ops"
    module = release_module(release, name)
    bound_early = module.copy_blocks
    calls = []

    def driver(dst, src, sizes, count, *rest):
        calls.append(rest)
        columns = ((ctypes.c_uint64 * count).from_address(at) for at in (dst, src, sizes))
        for to, at, nbytes in zip(*columns, strict=True):
            ctypes.memmove(to, at, nbytes)
        return 0

    module._batch_memcpy_fn, module._batch_memcpy = driver, (driver, 1)
    module._resolve_max_batch_descriptors = lambda: 0
    torch.manual_seed(0)
    caches, empty = ({n: make(BLOCKS, BYTES) for n in "ab"} for make in (filled, lambda *s: torch.zeros(s).char()))
    ids = [np.random.default_rng(column).permutation(BLOCKS)[:9].tolist() for column in range(2)]
    found = {}
    with rewritten(module, "copy_blocks", name) as site:
        for on in (False, True):
            site.on = on
            found[on] = {n: t.clone() for n, t in empty.items()}
            params = module.build_params(caches, found[on], SimpleNamespace(cuda_stream=5))
            with forced_staging(1 << 16):
                assert bound_early(*ids, params) is None
                bound_early([], [], params)
    assert len(calls) == 1 and calls[0][-1] == 5 and (site.calls, site.fallbacks) == (1, 0), site.reasons
    assert all(torch.equal(found[False][n], found[True][n]) for n in caches)
    assert not torch.equal(found[True]["a"], empty["a"])
