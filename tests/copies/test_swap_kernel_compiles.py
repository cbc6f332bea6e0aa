"""The swap kernel, compiled for a Hopper GPU; needs none."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", minversion="3.3")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from h2d_patch.copies import swap_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(swap_kernel.interpreted(), reason="TRITON_INTERPRET is set")


def ptx(width):
    constants = {"WIDTH": width, "CHUNK_WORDS": swap_kernel.CHUNK_BYTES // 8}
    signature = {"descriptors": "*i64", "blocks": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=swap_kernel.copy_blocks, signature=signature, constexprs=constants)
    options = {"num_warps": swap_kernel.WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_blocks_aligned_to_16_bytes_move_16_bytes_at_once_both_ways():
    text = ptx(16)
    assert re.search(r"ld\.global\S*\.v2\.b64|ld\.global\S*\.v4\.b32", text)
    assert re.search(r"st\.global\S*\.v2\.b64|st\.global\S*\.v4\.b32", text)


def test_blocks_aligned_to_8_bytes_never_do():
    assert not re.search(r"(ld|st)\.global\S*\.v\d", ptx(8))


def test_no_number_is_compiled_in():
    fixed = {p.name: p.do_not_specialize for p in swap_kernel.copy_blocks.params if not p.is_constexpr}
    assert fixed == {"descriptors": True, "blocks": True}
