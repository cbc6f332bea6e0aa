"""Copies many small blocks between pinned host memory and the device with a few programs, in either direction.

Why: a driver batch (`cuMemcpyBatchAsync`) spends about as long on each block below 32 KiB or so, whatever its size; a
kernel that reads or writes host memory by itself does not (docs/measurements.md; same idea: vllm-project/vllm#42212).

Layout: `descriptors` is int64 `[3, blocks]` on the device: addresses to read, addresses to write, bytes. Host addresses
must be pinned and mapped at the same address. Program p copies blocks p, p + programs, …, each in chunks.
Addresses and sizes are multiples of `WIDTH`: 16 lets a thread move 16 bytes at once, 8 is the least.

Runs on CPU memory under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Within 5 % of the best Triton kernel from 8 KiB up (docs/measurements.md), and few enough to leave the model its SMs.
PROGRAMS = 16
WARPS = 8
CHUNK_BYTES = 8192


def _copy_blocks(descriptors, blocks, WIDTH: tl.constexpr, CHUNK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, CHUNK_WORDS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        read = tl.load(descriptors + block)
        write = tl.load(descriptors + blocks + block)
        nbytes = tl.load(descriptors + 2 * blocks + block)
        # Said of the pointers: said of the addresses, Triton 3.6 forgets it, and moves 8 bytes at a time.
        source = tl.multiple_of(read.to(tl.pointer_type(tl.int64)), WIDTH)
        target = tl.multiple_of(write.to(tl.pointer_type(tl.int64)), WIDTH)
        words = tl.multiple_of((nbytes // 8).to(tl.int32), WIDTH // 8)
        for start in range(0, words, CHUNK_WORDS):
            at = start + lane
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)


# Nothing about a call's numbers is compiled in: one kernel for each width, whatever the number of blocks.
copy_blocks = triton.jit(_copy_blocks, do_not_specialize=["descriptors", "blocks"])


def interpreted() -> bool:
    """Whether the kernel runs on the CPU, in Triton's interpreter."""
    return type(copy_blocks).__name__ == "InterpretedFunction"


def launch(descriptors: Any, width: int) -> None:
    """Copy on the current stream. `descriptors`: int64 [3, n], contiguous, on the current device. `width`: 16 or 8."""
    blocks = descriptors.shape[1]
    copy_blocks[(PROGRAMS,)](descriptors, blocks, WIDTH=width, CHUNK_WORDS=CHUNK_BYTES // 8, num_warps=WARPS)
