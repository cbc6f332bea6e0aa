"""Copies of random shapes, dtypes and layouts from four threads on two streams, every destination checked.

    python bench/soak.py --json bench/results/soak.json

Threads share streams in pairs. Sources are overwritten at once after each call, unless the original copies them
asynchronously from where they lie (pinned, without gaps), in which case they stay until the copy is checked. Each
thread checks 64 copies at a time, ahead of which GPU work is often queued. A destination must have the bits, dtype and
strides that the original gives, and memory around it must stay as it was. The expected values come from a copy of the
random pool that lies on the device, converted there, as the original does where it may not block.

Done once for each size of the staging region; a small one is often full. Nothing here pins memory once it is warm, so
whatever torch's host allocator takes then would be a copy's doing. The first wrong destination ends it, exit status 1.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch

from h2d_patch import copies
from h2d_patch.bench.cases import Ledger
from h2d_patch.bench.device import Cpu, Device, open_device

FUNCTIONS = {
    "to_device": copies.to_device,
    "copy_h2d": copies.copy_h2d,
    "cat_to_device": copies.cat_to_device,
    "nested_to_device": copies.nested_to_device,
}
BATCH = 64
# GPU work ahead of every second batch of copies, on average: about as long as the copies take to be made.
QUEUE_MS = (1.0, 60.0)
SENTINEL = 0x5A  # around a strided destination
DTYPE_NAMES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"  # those there are
)
CONVERSIONS = {
    "bool": ("float32",),
    "uint8": ("float16",),
    "int64": ("int32", "float32"),
    "bfloat16": ("float32",),
    "float32": ("bfloat16", "float16", "float64"),
    "float64": ("float32",),
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Wrong(Exception):
    """A destination is not what the original gives."""


class Stopped(Exception):
    """Another thread has found something wrong."""


class NoRoom(Exception):
    """What is held until it is checked fills its memory."""


class Pools:
    """Random values, the same on the host and on the device: any bits, and numbers that conversions keep apart."""

    def __init__(self, device: Device, nbytes: int, seed: int) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        anything = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
        self.nbytes = nbytes
        self.host: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        for name in DTYPE_NAMES.split():
            dtype = getattr(torch, name, None)
            if dtype is None:
                continue
            count = nbytes // dtype.itemsize
            numbers = anything[:count] % 2 if dtype is torch.bool else anything[:count].remainder(251)
            if name in CONVERSIONS:
                self.host[dtype, True] = numbers.to(dtype)
            # No bits but these two are a bool.
            self.host[dtype, False] = numbers.to(dtype) if dtype is torch.bool else anything.view(dtype)
        # `.to` would give back the same memory on the CPU.
        self.on_device = {key: torch.empty_like(v, device=device.device).copy_(v) for key, v in self.host.items()}
        for key, values in self.host.items():
            if not torch.equal(bits(self.on_device[key].cpu()), bits(values)):
                raise RuntimeError(f"the pool of {key} did not arrive")

    def dtypes(self, converted: bool) -> list[torch.dtype]:
        return [dtype for dtype, numbers in self.host if numbers is converted]


class Arena:
    """Host memory that is handed out front to back, again and again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._at = 0

    def take(self, nbytes: int, skip: int) -> torch.Tensor:
        """Bytes that start `skip` behind a boundary of 64. Raises NoRoom."""
        start = -(-self._at // 64) * 64 + skip
        if start + nbytes > self.memory.numel():
            raise NoRoom
        self._at = start + nbytes
        return self.memory[start : self._at]

    def reset(self) -> None:
        self._at = 0


@dataclass
class Source:
    """A CPU tensor, the memory under it, and its values on the device."""

    tensor: torch.Tensor
    memory: torch.Tensor
    known: torch.Tensor
    pinned: bool
    dense: bool
    text: str

    @property
    def stays(self) -> bool:
        """The original may read it after its call has returned, so it must not be overwritten yet."""
        return self.pinned and self.dense

    def overwrite(self) -> None:
        if self.tensor.dtype is torch.bool:
            self.memory.bitwise_xor_(1)
        else:
            self.memory.bitwise_not_()


@dataclass
class Pending:
    """A copy that is not checked yet."""

    number: int
    text: str
    found: list[torch.Tensor]
    expected: Callable[[], list[torch.Tensor]]
    strides: list[tuple[int, ...]]
    keep: list[Any] = field(default_factory=list)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype.itemsize])


class Worker:
    """One thread's copies."""

    def __init__(self, run: Run, index: int, stream: Any) -> None:
        self.run = run
        self.index = index
        self.stream = stream
        self.check_stream = run.device.new_stream()
        self.rng = random.Random(f"{run.seed}/{run.pinned_mb}/{index}")
        largest, device = run.largest, run.device
        reach = 2 * largest + (64 << 10)  # gaps take as much again
        self.pageable = Arena(torch.empty(reach, dtype=torch.uint8, device="cpu"))
        self.pinned = Arena(device.empty_pinned(reach, dtype=torch.uint8))
        self.held = Arena(device.empty_pinned(reach, dtype=torch.uint8))
        self.ledger = Ledger()
        self.functions = {name: function.bind(self.ledger) for name, function in FUNCTIONS.items()}
        self.outcomes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.nbytes = 0
        self.queued_behind = 0
        self.behind: Any = None
        self.pending: list[Pending] = []
        self.number = 0
        self.error: BaseException | None = None

    def work(self) -> None:
        torch.set_num_threads(1)  # of this thread
        device = self.run.device
        try:
            with ExitStack() as stack:
                if isinstance(device, Cpu):
                    stack.enter_context(copies.forced_staging(self.run.pinned_mb << 20))
                stack.enter_context(device.on(self.stream))
                for number in range(self.run.copies_of(self.index)):
                    self.number = number
                    if self.run.stop.is_set():
                        raise Stopped
                    if not self.pending and self.rng.random() < 0.5:
                        device.queue(self.rng.uniform(*QUEUE_MS))
                        self.behind = device.mark()
                    self.copy()
                    if len(self.pending) >= BATCH:
                        self.check()
                self.check()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
            self.run.stop.set()

    def copy(self) -> None:
        state = self.rng.getstate()
        try:
            self.one()
        except NoRoom:
            self.check()
            self.rng.setstate(state)
            self.one()

    def one(self) -> None:
        self.pageable.reset()
        self.pinned.reset()
        name = self.rng.choices(list(FUNCTIONS), (45, 25, 15, 15))[0]
        pending, sources, call = getattr(self, f"make_{name}")(name)
        fallbacks, reasons = self.ledger.fallbacks, self.ledger.reasons.copy()
        result = call()
        if self.behind is not None and not self.behind.query():
            self.queued_behind += 1
        fell_back = self.ledger.fallbacks - fallbacks
        if fell_back and isinstance(self.run.device, Cpu):  # where the original's `.to` gives the source itself back
            result = _each(result, lambda tensor: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor)
        for source in sources:
            if not source.stays:
                source.overwrite()
        pending.found += _leaves(result)
        pending.keep.append(sources)
        self.pending.append(pending)
        self.calls[name] += 1
        self.nbytes += sum(source.tensor.nbytes for source in sources)
        if not fell_back:
            self.outcomes[self._without_fallback(name, pending, sources)] += 1
        for reason, times in (self.ledger.reasons - reasons).items():
            self.outcomes[f"fallback: {reason}"] += times if name != "nested_to_device" else 1

    def _without_fallback(self, name: str, pending: Pending, sources: list[Source]) -> str:
        if not sum(source.tensor.numel() for source in sources):
            return "nothing to copy"
        if name != "cat_to_device" and all(source.stays for source in sources):
            return "pinned without gaps: the original where it does not wait, else staged"
        return "staged"

    # --- what is copied ---

    def elements(self, itemsize: int) -> int:
        """Mostly about 16 KiB, some of megabytes, now and then none or one."""
        luck = self.rng.random()
        if luck < 0.01:
            return 0
        if luck < 0.03:
            return 1
        if luck < 0.985:
            nbytes = min(16384 * 2 ** self.rng.gauss(0, 2.2), 1 << 20)
        else:
            nbytes = (1 << 20) * 2 ** (5 * self.rng.random() ** 2)  # up to 32 MiB
        return max(1, int(min(nbytes, self.run.largest)) // itemsize)

    def source(self, dtype: torch.dtype, shape: list[int], numbers: bool = False) -> Source:
        """Raises NoRoom."""
        rng, size = self.rng, dtype.itemsize
        pinned = rng.random() < 0.4
        layout = rng.choices(("contiguous", "gapped", "stepped", "transposed", "transposed gapped"), (5, 2, 1, 1, 1))[0]
        if not shape or (len(shape) < 2 and layout != "stepped"):
            layout = "contiguous"
        whole = list(shape)
        if "transposed" in layout:
            whole[0], whole[-1] = whole[-1], whole[0]
        last = whole[-1] if whole else 1
        if "gapped" in layout:
            whole[-1] = last + rng.randint(1, max(1, min(last, 64)))
        elif layout == "stepped":
            whole[-1] = 2 * last
        dense = layout in ("contiguous", "transposed")
        count = math.prod(whole)
        # A side of one may leave no gaps after all: one element of two is contiguous.
        arena = self.held if pinned and (dense or 1 in shape) else self.pinned if pinned else self.pageable
        memory = arena.take(count * size, rng.randrange(4) * size)
        tensor = memory.view(dtype).view(whole)
        if "gapped" in layout:
            tensor = tensor[..., :last]
        elif layout == "stepped":
            tensor = tensor[..., ::2]
        if "transposed" in layout:
            tensor = tensor.transpose(0, -1)
        pools, number = self.run.pools, tensor.numel()
        start = rng.randrange(pools.host[dtype, numbers].numel() - number + 1)
        tensor.copy_(pools.host[dtype, numbers][start : start + number].view(shape))
        known = pools.on_device[dtype, numbers][start : start + number].view(shape)
        place = "pinned" if pinned and not isinstance(self.run.device, Cpu) else "pageable"
        dense = dense or tensor.is_contiguous()
        text = f"{str(dtype).removeprefix('torch.')} {shape} {place} {layout}"
        return Source(tensor, memory, known, pinned, dense, text)

    def shape(self, elements: int) -> list[int]:
        """Of about so many elements, up to three dimensions."""
        if not elements:
            return self.rng.choice([[0], [3, 0], [0, 5]])
        if elements == 1 and self.rng.random() < 0.5:
            return []
        sides = []
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            side = min(elements, self.rng.choice((1, 2, 3, 3, 16, 31, 64, 200, 1024)))
            sides.append(side)
            elements //= side
        sides.append(max(1, elements))
        self.rng.shuffle(sides)
        return sides

    def kind(self, converted: bool) -> tuple[torch.dtype, torch.dtype | None]:
        dtype = self.rng.choice(self.run.pools.dtypes(converted))
        if not converted:
            return dtype, None
        name = str(dtype).removeprefix("torch.")
        return dtype, getattr(torch, self.rng.choice(CONVERSIONS[name]))

    # --- the four functions; each gives what to expect, the sources, and the call ---

    def make_to_device(self, name: str) -> tuple[Pending, list[Source], Callable[[], Any]]:
        dtype, to = self.kind(self.rng.random() < 0.2)
        source = self.source(dtype, self.shape(self.elements(dtype.itemsize)), to is not None)
        args = (self.run.device.device,) if to is None else (self.run.device.device, to)
        text = f"{name}: {source.text}{f' to {to}' if to else ''}"
        pending = Pending(
            self.number,
            text,
            [],
            lambda: [source.known if to is None else source.known.to(to)],
            [torch.empty_like(source.tensor).stride()],
        )
        return pending, [source], lambda: self.functions[name](source.tensor, *args)

    def make_nested_to_device(self, name: str) -> tuple[Pending, list[Source], Callable[[], Any]]:
        rng = self.rng
        sources = []
        number = rng.randint(1, 12)
        left = self.elements(8)  # of eight bytes, among them all
        for _ in range(number):
            dtype, _ = self.kind(False)
            elements = min(self.elements(dtype.itemsize), left * 8 // number // dtype.itemsize)
            sources.append(self.source(dtype, self.shape(elements)))
        tensors: list[Any] = [source.tensor for source in sources]
        form = rng.randrange(3)
        nested: Any = tensors
        if form == 1:
            nested = {"a": tensors[:1], "b": (*tensors[1:], "a word")}
        elif form == 2:
            nested = [tensors[: number // 2], [tuple(tensors[number // 2 :])], 7]
        strides = [torch.empty_like(tensor).stride() for tensor in tensors]
        text = f"{name}, form {form}: {'; '.join(source.text for source in sources)}"
        pending = Pending(self.number, text, [], lambda: [source.known for source in sources], strides)
        return pending, sources, lambda: self.functions[name](nested, self.run.device.device)

    def make_cat_to_device(self, name: str) -> tuple[Pending, list[Source], Callable[[], Any]]:
        rng = self.rng
        dtype, to = self.kind(rng.random() < 0.1)
        number = rng.randint(1, 24)
        shape = self.shape(max(number, self.elements(dtype.itemsize)) // number) or [1]
        dim = rng.randrange(len(shape))
        sources = []
        for _ in range(number):
            sides = list(shape)
            sides[dim] = rng.randint(0, sides[dim])
            sources.append(self.source(dtype, sides, to is not None))
        args = (self.run.device.device,) if to is None else (self.run.device.device, to)
        parts = [source.tensor for source in sources]

        def expected() -> list[torch.Tensor]:
            whole = torch.cat([source.known for source in sources], dim=dim)
            return [whole if to is None else whole.to(to)]

        text = f"{name} along {dim}{f' to {to}' if to else ''}: {'; '.join(source.text for source in sources)}"
        sides = list(shape)
        sides[dim] = sum(part.shape[dim] for part in parts)
        strides = [torch.empty(sides, dtype=dtype, device="cpu").stride()]  # of three dimensions at most: contiguous
        return (
            Pending(self.number, text, [], expected, strides),
            sources,
            lambda: self.functions[name](parts, *args, dim=dim),
        )

    def make_copy_h2d(self, name: str) -> tuple[Pending, list[Source], Callable[[], Any]]:
        """Into a view of memory that is full of a sentinel, all of which is checked."""
        rng = self.rng
        dtype, to = self.kind(rng.random() < 0.15)
        source = self.source(dtype, self.shape(self.elements(dtype.itemsize)), to is not None)
        shape = list(source.tensor.shape)
        layout = rng.choice(("contiguous", "gapped", "stepped", "transposed")) if shape else "contiguous"
        if "transposed" in layout:
            shape[0], shape[-1] = shape[-1], shape[0]
        last = shape[-1] if shape else 1
        if layout == "gapped":
            shape[-1] = last + rng.randint(1, 64)
        elif layout == "stepped":
            shape[-1] = 2 * last
        there = to or dtype
        count = there.itemsize
        for side in shape:
            count *= side

        def view(memory: torch.Tensor) -> torch.Tensor:
            whole = memory.view(there).view(shape)
            if layout == "gapped":
                return whole[..., :last]
            if layout == "stepped":
                return whole[..., ::2]
            return whole.transpose(0, -1) if layout == "transposed" else whole

        device = self.run.device.device
        memory = torch.full((count,), SENTINEL, dtype=torch.uint8, device=device)
        target = view(memory)

        def expected() -> list[torch.Tensor]:
            like = torch.full((count,), SENTINEL, dtype=torch.uint8, device=device)
            view(like).copy_(source.known)
            return [like]

        def call() -> torch.Tensor:
            returned = self.functions[name](target, source.tensor)
            if returned is not target:
                raise Wrong(f"{text}: it returned another tensor than its destination")
            return memory

        text = f"{name}: {source.text} into {there} {layout}"
        return Pending(self.number, text, [], expected, [(1,)]), [source], call

    # --- whether it arrived ---

    def check(self) -> None:
        """Wait for this thread's copies, and compare them all."""
        if not self.pending:
            return
        device = self.run.device
        device.mark().synchronize()
        differ: list[tuple[Pending, torch.Tensor]] = []
        # Not behind what the other thread of this stream has queued meanwhile.
        with device.on(self.check_stream) if self.check_stream is not None else nullcontext():
            for pending in self.pending:
                expected = pending.expected()
                if len(expected) != len(pending.found):
                    raise Wrong(self._said(pending, f"{len(pending.found)} tensors for {len(expected)}"))
                for found, values, strides in zip(pending.found, expected, pending.strides, strict=True):
                    if found.shape != values.shape or found.dtype != values.dtype or found.device != values.device:
                        raise Wrong(self._said(pending, f"{found.dtype} {found.shape} on {found.device}"))
                    if found.stride() != strides and found.numel():
                        raise Wrong(self._said(pending, f"strides {found.stride()}, expected {strides}"))
                    if found.numel():
                        differ.append((pending, (bits(found) != bits(values)).sum()))
            if differ:
                # `.cpu()` and nothing else: `.item()`, `equal` and `nonzero` take pinned memory.
                for (pending, _), number in zip(
                    differ, torch.stack([n for _, n in differ]).cpu().tolist(), strict=True
                ):
                    if number:
                        raise Wrong(self._said(pending, f"{number} elements differ"))
        del differ
        self.pending.clear()
        self.held.reset()

    def _said(self, pending: Pending, what: str) -> str:
        run = self.run
        return (
            f"seed {run.seed}, {run.pinned_mb} MB, thread {self.index}, copy {pending.number}: {pending.text}: {what}"
        )


class Run:
    """All copies with one size of the staging region."""

    def __init__(self, device: Device, pinned_mb: int, pools: Pools, options: argparse.Namespace) -> None:
        self.device = device
        self.pinned_mb = pinned_mb
        self.pools = pools
        self.seed: int = options.seed
        self.largest: int = (options.largest_mb << 20) - (32 << 10)  # so that the arenas are powers of two
        self.copies: int = options.copies
        self.threads: int = options.threads
        self.stop = threading.Event()
        streams = [device.new_stream() for _ in range(-(-self.threads // 2))]
        self.workers = [Worker(self, index, streams[index // 2]) for index in range(self.threads)]

    def copies_of(self, index: int) -> int:
        return self.copies // self.threads + (index < self.copies % self.threads)

    def result(self) -> dict[str, Any]:
        device, ring_bytes = self.device, self.pinned_mb << 20
        with _counted_pinning() as pinned_by_us:
            if not isinstance(device, Cpu):
                report = copies.start(device.device, ring_bytes)
                if not report.ring_bytes:
                    raise SystemExit(f"no staging region of {self.pinned_mb} MB: {'; '.join(report.reasons)}")
                ring_bytes = report.ring_bytes
            for_the_ring = pinned_by_us[0]
            device.synchronize()
            before, before_bytes = device.pinned_allocations(), device.pinned_bytes()
            began = time.perf_counter()
            threads = [threading.Thread(target=worker.work, name=f"soak-{worker.index}") for worker in self.workers]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self.stop.set()
                raise
        seconds = time.perf_counter() - began
        errors = [worker.error for worker in self.workers if worker.error is not None]
        after = after_bytes = None
        try:
            device.synchronize()
            after, after_bytes = device.pinned_allocations(), device.pinned_bytes()
            if not isinstance(device, Cpu):
                copies.stop()
        except Exception as error:  # what the threads found is to be written all the same
            errors.append(error)
        outcomes: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for worker in self.workers:
            outcomes += worker.outcomes
            calls += worker.calls
        done = sum(calls.values())
        return {
            "bound_bytes": self.pinned_mb << 20,
            "ring_bytes": ring_bytes,
            "copies": done,
            "copies_of_each_thread": [sum(worker.calls.values()) for worker in self.workers],
            "tensors": sum(worker.ledger.calls for worker in self.workers),
            "bytes": sum(worker.nbytes for worker in self.workers),
            "seconds": round(seconds, 1),
            "calls": dict(calls.most_common()),
            "outcomes": dict(outcomes.most_common()),
            "returned_with_work_still_queued_ahead": sum(worker.queued_behind for worker in self.workers),
            "torch_pinned_allocations": None if before is None or after is None else after - before,
            "torch_pinned_bytes_added": None
            if before_bytes is None or after_bytes is None
            else after_bytes - before_bytes,
            # Where not even the ring's was seen, this is not where our code allocates.
            "pinned_allocations_of_ours": pinned_by_us[0] - for_the_ring if for_the_ring else None,
            "wrong": [str(error) for error in errors if isinstance(error, Wrong)],
            "errors": [_trace(error) for error in errors if not isinstance(error, Wrong)],
            "complete": not errors and done == self.copies,
        }


@contextmanager
def _counted_pinning() -> Iterator[list[int]]:
    """One number: how often our own code has asked CUDA for pinned memory meanwhile."""
    from h2d_patch.copies import cuda

    counted, runtime, original = [0], cuda.Runtime, cuda.Runtime.allocate_pinned

    def allocate_pinned(self: Any, nbytes: int) -> int:
        counted[0] += 1
        return original(self, nbytes)

    runtime.allocate_pinned = allocate_pinned  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        runtime.allocate_pinned = original  # type: ignore[method-assign]


def _each(value: Any, do: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _each(item, do) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, do) for item in value)
    return do(value)


def _leaves(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _each(value, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--copies", type=int, default=100_000, help="with each size of the staging region")
    parser.add_argument("--pinned-mb", type=int, nargs="+", default=[16, 256], help="sizes of the staging region")
    parser.add_argument("--largest-mb", type=int, default=32, help="the largest tensor")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        device = open_device(options.device)
    except ValueError as error:
        parser.error(f"--device {error}")
    pools = Pools(device, 2 * options.largest_mb << 20, options.seed)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result: dict[str, Any] = {
        "what": "random copies, each checked",
        "settings": settings,
        "complete": False,
        "runs": [],
    }
    pinned: list[int | None] = []
    for pinned_mb in options.pinned_mb:
        found = Run(device, pinned_mb, pools, options).result()
        result["runs"].append(found)
        print(f"{pinned_mb} MB: {found['copies']} copies in {found['seconds']} s, {found['outcomes']}", flush=True)
        print(*found["wrong"], *found["errors"], sep="\n", end="", file=sys.stderr)
        pinned += [found["torch_pinned_allocations"], found["pinned_allocations_of_ours"]]
        result["complete"] = found["complete"] and len(result["runs"]) == len(options.pinned_mb)
        record.write(options.json, result)
        if not found["complete"]:
            break
    if any(pinned):
        print(f"pinned memory was allocated while warm: {pinned}", file=sys.stderr)
    return 0 if result["complete"] and not any(pinned) else 1


if __name__ == "__main__":
    sys.exit(main())
