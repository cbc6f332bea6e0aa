"""Copies many blocks between pinned host memory and the device with a kernel of Triton's, on any GPU, either direction.

Why: a driver batch (`cuMemcpyBatchAsync`) spends about as long on each block below 32 KiB or so, whatever its size; a
kernel that reads or writes host memory by itself does not (docs/swap.md; same idea: vllm-project/vllm#42212). Where the
device has bulk asynchronous copies, `swap_bulk.cu` does the same with fewer SMs.

Layout: `descriptors` is int64 `[3, blocks]`: addresses to read, addresses to write, bytes. `cuts` is int64
`[programs + 1, 2]`: (block, offset in it) where the share of each program begins and that of the last one ends. Both
lie on the device or in pinned memory. Addresses, sizes and offsets are multiples of `WIDTH`: 16 lets a thread move 16
bytes at once.

Runs on CPU memory under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

WARPS = 8
CHUNK_BYTES = 8192
WIDTHS = (16, 8, 4, 1)


def _copy_blocks(  # type: ignore[no-untyped-def]
    descriptors, blocks, cuts, WIDTH: tl.constexpr, WORD: tl.constexpr, CHUNK_WORDS: tl.constexpr
):
    lane = tl.arange(0, CHUNK_WORDS)
    cut = cuts + 2 * tl.program_id(0)
    first = tl.load(cut)
    offset = tl.load(cut + 1)
    last = tl.load(cut + 2)
    end = tl.load(cut + 3)
    for block in range(first, tl.minimum(last + 1, blocks)):
        read = tl.load(descriptors + block)
        write = tl.load(descriptors + blocks + block)
        nbytes = tl.load(descriptors + 2 * blocks + block)
        nbytes = tl.where(block == last, end, nbytes)
        begin = tl.where(block == first, offset, 0)
        # Said of the pointers: said of the addresses, Triton 3.6 forgets it, and moves 8 bytes at a time.
        if WORD == 8:
            source = tl.multiple_of((read + begin).to(tl.pointer_type(tl.int64)), WIDTH)
            target = tl.multiple_of((write + begin).to(tl.pointer_type(tl.int64)), WIDTH)
        elif WORD == 4:
            source = tl.multiple_of((read + begin).to(tl.pointer_type(tl.int32)), WIDTH)
            target = tl.multiple_of((write + begin).to(tl.pointer_type(tl.int32)), WIDTH)
        else:
            source = (read + begin).to(tl.pointer_type(tl.int8))
            target = (write + begin).to(tl.pointer_type(tl.int8))
        words = tl.multiple_of((nbytes - begin) // WORD, WIDTH // WORD)
        for start in range(0, words, CHUNK_WORDS):
            at = start + lane
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)


# Nothing about a call's numbers is compiled in: one kernel for each width, whatever the number of blocks.
copy_blocks = triton.jit(_copy_blocks, do_not_specialize=["descriptors", "blocks", "cuts"])


def interpreted() -> bool:
    """Whether the kernel runs on the CPU, in Triton's interpreter."""
    return type(copy_blocks).__name__ == "InterpretedFunction"


def width_of(odd: int) -> int:
    """The widest of `WIDTHS` of which the numbers that were or-ed into `odd` are multiples."""
    return next(width for width in WIDTHS if not odd % width)


def constants(width: int) -> dict[str, int]:
    """What is compiled in for a width."""
    word = min(width, 8)
    return {"WIDTH": width, "WORD": word, "CHUNK_WORDS": CHUNK_BYTES // word}


def launch(descriptors: Any, blocks: int, cuts: Any, programs: int, width: int) -> None:
    """Copy on the current stream. `descriptors` and `cuts`: int64 tensors."""
    copy_blocks[(programs,)](descriptors, blocks, cuts, **constants(width), num_warps=WARPS)
