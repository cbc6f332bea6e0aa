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
    constants = swap_kernel.constants(width)
    signature = {"descriptors": "*i64", "blocks": "i32", "cuts": "*i64", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=swap_kernel.copy_blocks, signature=signature, constexprs=constants)
    options = {"num_warps": swap_kernel.WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_blocks_aligned_to_16_bytes_move_16_bytes_at_once_both_ways():
    text = ptx(16)
    assert re.search(r"ld\.global\S*\.v2\.b64|ld\.global\S*\.v4\.b32", text)
    assert re.search(r"st\.global\S*\.v2\.b64|st\.global\S*\.v4\.b32", text)


@pytest.mark.parametrize("width, word", [(8, "b64"), (4, "b32"), (1, "b8")])
def test_less_aligned_blocks_move_in_words_of_what_they_are_aligned_to(width, word):
    text = ptx(width)
    moved = set(re.findall(r"@%p\d+ (?:ld|st)\.global\S*?\.(v\d\.b\d+|b\d+)", text))
    assert word in moved and not any(kind.startswith("v") for kind in moved), moved


def test_no_number_is_compiled_in():
    fixed = {p.name: p.do_not_specialize for p in swap_kernel.copy_blocks.params if not p.is_constexpr}
    assert fixed == {"descriptors": True, "blocks": True, "cuts": True}
