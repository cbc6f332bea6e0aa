"""The kernel of bulk copies, run on the host by an emulation of what it does in asm. Needs g++, and no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "h2d_patch" / "copies" / "swap_bulk.cu"
EMULATION = Path(__file__).with_name("bulk_emulation.cpp")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNS = 75  # of a seed

# What stands for each asm statement: by its text without white space at the ends of its lines, its operands put in.
CALLS = {
    "mbarrier.init.shared::cta.b64 [%0], 1;": "emulated::barrier_init({})",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "emulated::barrier_expect({}, {})",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }": (
        "{} = emulated::barrier_try_wait({}, {})"
    ),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        "emulated::fetch({}, {}, {}, {})"
    ),
    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;": "emulated::put({}, {}, {})",
    "fence.proxy.async.shared::cta;": "emulated::fence()",
    "cp.async.bulk.commit_group;": "emulated::commit_group()",
    "cp.async.bulk.wait_group.read %0;": "emulated::wait_group_read({})",
    "cp.async.bulk.wait_group 0;": "emulated::wait_group(0)",
}

STRING = r'"(?:[^"\\]|\\.)*"'
STATEMENT = re.compile(rf'\basm\s+volatile\s*\(((?:{STRING}|[^";])*)\);')
TEMPLATE = re.compile(rf"\s*((?:{STRING}\s*)+)")
OPERAND = re.compile(r'"=?[rln]"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')  # parentheses in it, two deep


def call(statement):
    """What stands for an asm statement, given as a match of it. Raises LookupError where nothing does."""
    template = TEMPLATE.match(statement[1])
    text = "".join(re.findall(STRING, template[1])).replace('"', "").replace(r"\n", " ").replace(r"\t", " ")
    text = " ".join(text.split())
    operands = OPERAND.findall(statement[1][template.end() :])
    if text not in CALLS:
        raise LookupError(f"{EMULATION.name} has nothing for {text!r}")
    expected = CALLS[text].count("{}")
    if len(operands) != expected:
        raise LookupError(f"{text!r} has {len(operands)} operands, not {expected}: {operands}")
    return CALLS[text].format(*operands) + ";"


def on_the_host(source):
    """A CUDA source as C++ that bulk_emulation.cpp can include. Raises LookupError for what it cannot stand for."""
    text = STATEMENT.sub(call, source).replace("extern __shared__", "extern")
    left = re.search(r".*\basm\b.*", text)
    if left:
        raise LookupError(f"not understood: {left[0].strip()}")
    return text


def build(folder, kernel, *options):
    """The program that runs a kernel so made. Raises CalledProcessError."""
    (folder / "emulated_kernel.inc").write_text(kernel)
    program = folder / "bulk_emulation"
    command = ["g++", "-std=c++17", "-O1", "-w", *options, f"-I{folder}", EMULATION, "-o", program]
    subprocess.run(command, check=True)
    return program


def run(program, seed, runs):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    command = [program, str(seed), str(runs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """The program of the kernel as it is; with sanitizers where they work here."""
    folder, kernel = tmp_path_factory.mktemp("emulation"), on_the_host(SOURCE.read_text())
    try:
        program = build(folder, kernel, *SANITIZERS)
        if run(program, seed=1, runs=0).returncode == 0:
            return program
    except subprocess.CalledProcessError:
        pass  # linked without them below; what else is wrong is so there, too
    return build(folder, kernel)


@needs_a_compiler
@pytest.mark.parametrize("seed", [1, 2])
def test_the_kernel_copies_what_a_copy_byte_by_byte_does_and_keeps_the_rules_of_bulk_copies(emulation, seed):
    ended = run(emulation, seed, RUNS)
    assert (ended.stdout, ended.returncode) == (f"{RUNS} runs are right\n", 0), ended.stderr


@needs_a_compiler
@pytest.mark.parametrize(
    "right, wrong, rule",
    [
        ('asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");', ";", "a stage is filled while a put reads it"),
        ('asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', ";", "a put is not waited for at the end"),
        ("start & (LINE - 1)", "start & 15", "a fetch does not begin at a multiple of 128"),
        ("expect(barriers + filling, fetched)", "expect(barriers + filling, fetched + 16)", "a wait never ends"),
        ("__funnelshift_r(w2, w3,", "__funnelshift_r(w2, w2,", "a byte of a block is wrong"),
        ("if (more) {", "if (more && lane != 3) {", "the lanes of a warp do not meet at the same place"),
    ],
)  # fmt: skip
def test_a_kernel_with_a_mistake_breaks_the_rule_that_it_is_about(tmp_path, right, wrong, rule):
    source = SOURCE.read_text()
    assert source.count(right) == 1
    ended = run(build(tmp_path, on_the_host(source.replace(right, wrong)), "-O0"), seed=1, runs=RUNS)
    assert ended.returncode == 1 and ended.stdout.endswith(f": {rule}\n"), ended


@pytest.mark.parametrize(
    "statement, said",
    [
        ('asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(nbytes));', "nothing for 'cp.async.bulk.prefetch"),
        ('asm volatile("cp.async.bulk.wait_group.read %0;" ::: "memory");', "0 operands, not 1"),
        ('asm("exit;");', "not understood: asm"),
    ],
)  # fmt: skip
def test_an_instruction_that_is_not_emulated_is_named(statement, said):
    with pytest.raises(LookupError, match=said):
        on_the_host(SOURCE.read_text() + statement)
