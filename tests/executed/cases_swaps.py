"""What the swaps of KV blocks touch. The same memory is used in every run, so that addresses are the same too."""

from __future__ import annotations

import ast
import ctypes
import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases_runner import cdiv
from forms import Call, Form, World, case

BLOCKS, BYTES = 12, 64
HANDLER = "SingleDirectionOffloadingHandler.transfer_async"


@functools.cache
def memory() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both sides of a swap: two tensors of blocks, and one of keys and values."""
    shapes = [(BLOCKS, BYTES), (BLOCKS, BYTES), (2, BLOCKS, BYTES)]
    torch.manual_seed(0)
    src = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]
    return src, [torch.zeros_like(tensor) for tensor in src]


def emptied(number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    src, dst = memory()
    for tensor in dst:
        tensor.zero_()
    return src[:number], dst[:number]


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, *size_and_mapping: Any) -> None:
    *size, mapping = size_and_mapping
    nbytes = size[0] if size else src.stride(0)
    for i, j in mapping.tolist():
        ctypes.memmove(dst.data_ptr() + j * nbytes, src.data_ptr() + i * nbytes, nbytes)


def swap_blocks_batch(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    for at, to, nbytes in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(to, at, nbytes)


@case(
    "vllm.v1.kv_offload.worker.cpu_gpu:CpuGpuOffloadingHandler.transfer_async",
    f"vllm.v1.kv_offload.worker.cpu_gpu:{HANDLER}",
    f"vllm.v1.kv_offload.cpu.gpu_worker:{HANDLER}",
)
def transfer(world: World, form: Form) -> Call:
    (node,) = world.source.named(form.qualname)
    keys_and_values = any(getattr(each, "attr", "") == "kv_dim_before_num_blocks" for each in ast.walk(node))
    src, dst = emptied(3 if keys_and_values else 2)
    refs = [[SimpleNamespace(tensor_idx=index, page_size_bytes=BYTES) for index in range(2)]]
    ones = (
        "block_size_factor",
        "src_block_size_factor",
        "dst_block_size_factor",
        "src_blocks_per_chunk",
        "dst_blocks_per_chunk",
    )
    world.give(
        ops=SimpleNamespace(swap_blocks=swap_blocks, swap_blocks_batch=swap_blocks_batch),
        cdiv=cdiv,
        Transfer=SimpleNamespace,
    )
    made = world.owner(
        form.qualname,
        **dict.fromkeys(ones, 1),
        h2d_stream=world.pretend("stream"), events_pool=[world.pretend("event")], transfer_events={},
        _transfer_events={}, _transfers=deque(), _stream_pool=[world.pretend("stream")], _buffer_pool=[],
        _event_pool=[world.pretend("start"), world.pretend("end")], gpu_to_cpu=False, transfer_type=("CPU", "GPU"),
        kv_dim_before_num_blocks=[tensor.dim() == 3 for tensor in src],
        block_size_in_bytes=[BYTES] * len(src), tensor_block_size_in_bytes=[BYTES] * len(src),
        total_block_size_in_bytes=BYTES, group_block_size_in_bytes=[BYTES],
        kv_cache_groups_data_refs=refs, layer_refs_per_group=refs, _canonical_copy_plans=None,
        _swap_blocks_batch=swap_blocks_batch,
        _fill_group_ops=lambda *args, **kwargs: made._fill_direct_ops(*args, **kwargs),
        **dict.fromkeys(("src_tensors", "cpu_tensors"), src), **dict.fromkeys(("dst_tensors", "gpu_tensors"), dst),
    )  # fmt: skip
    specs = [
        SimpleNamespace(
            is_a=("BlockIDsLoadStoreSpec", kind),
            block_ids=np.random.default_rng(seed).permutation(BLOCKS)[:9],
            group_sizes=[9],
            block_indices=[0],
        )
        for seed, kind in enumerate(("CPULoadStoreSpec", "GPULoadStoreSpec"))
    ]
    apart = world.takes(form.qualname, "src_spec")
    return lambda function: function(made, 7, *specs) if apart else function(made, 7, tuple(specs))


@case("vllm.v1.simple_kv_offload.cuda_mem_ops:copy_blocks")
def copy_blocks(world: World, form: Form) -> Call:
    src, dst = emptied(2)
    world.watched.append(dst)

    def driver(dst: int, src: int, sizes: int, count: int, *rest: Any) -> int:
        columns = ((ctypes.c_uint64 * count).from_address(at) for at in (dst, src, sizes))
        for to, at, nbytes in zip(*columns, strict=True):
            ctypes.memmove(to, at, nbytes)
        return 0

    # In two parts, where the release has them.
    world.give(_batch_memcpy_fn=driver, _batch_memcpy=(driver, 1), _resolve_max_batch_descriptors=lambda: 10)
    params = SimpleNamespace(
        src_bases=np.array([tensor.data_ptr() for tensor in src], dtype=np.uint64),
        dst_bases=np.array([tensor.data_ptr() for tensor in dst], dtype=np.uint64),
        bpb=np.full(2, BYTES, dtype=np.uint64),
        num_layers=2, attrs=ctypes.c_int(), attrs_idx=ctypes.c_size_t(), fail_idx=ctypes.c_size_t(), num_attrs=1,
        stream_handle=0,
    )  # fmt: skip
    ids = [np.random.default_rng(seed).permutation(BLOCKS)[:9].tolist() for seed in range(2)]
    return lambda function: [function(*ids, params), function([], [], params)]
