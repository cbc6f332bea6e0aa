"""Stand-ins for the names in a pattern, from `given` in the manifest: `"self.positions.cpu = tensor(3, 513)"`.

The right side may use numbers, strings, lists, tuples, dictionaries, names given before it, and

    size(low, high)                          a random whole number, both ends included
    tensor(*shape, dtype=, pinned=)          random values in CPU memory: what is copied
    buffer(*shape, dtype=)                   zeros on the device: what is copied into
    on_device(tensor(...))                   the same values on the device, not overwritten
    device                                   the device under test
    nested()                                 lists, tuples and dictionaries of tensors of every kind, and other leaves
    consume                                  a function that copies the tensors it is called with to the device
    blocks(number, bytes)                    scattered blocks of host and device memory, as a KV swap sees them
    layers(number, bytes)                    pairs of tensors, and a mapping of `number` blocks in each
"""

from __future__ import annotations

import ast
import ctypes
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

VOCABULARY = ("size", "tensor", "buffer", "on_device", "device", "nested", "consume", "blocks", "layers")
_NODES = (
    ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp,
    ast.unaryop, ast.BinOp, ast.operator, ast.expr_context,
)  # fmt: skip


class GivenError(ValueError):
    """A line of `given` that cannot be used; says what was found and what was expected."""


def parse(line: str) -> tuple[list[str], ast.Expression]:
    """The dotted name and the right side of a line. Raises GivenError."""
    try:
        body = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or error or type(error).__name__
        raise GivenError(f"{line[:80]!r} is not Python ({reason}); expected 'NAME = VALUE'") from None
    if len(body) != 1 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
        raise GivenError(f"found {line!r}; expected 'NAME = VALUE'")
    path: list[str] = []
    target: ast.expr = body[0].targets[0]
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    if not isinstance(target, ast.Name) or (target.id in VOCABULARY and target.id != body_name(body[0].value)):
        raise GivenError(f"found {line!r}; expected a name of your own, or one with dots, on the left")
    for node in ast.walk(body[0].value):
        if (
            not isinstance(node, _NODES)
            or (isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in VOCABULARY))
            or (isinstance(node, ast.Attribute) and node.attr.startswith("_"))
        ):
            raise GivenError(f"{ast.unparse(node)!r} in {line!r}; expected only {', '.join(VOCABULARY)} and constants")
    return [target.id, *path], ast.Expression(body[0].value)


def body_name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


class _Pair(NamedTuple):
    first: object
    second: object


class _Stack(list):  # type: ignore[type-arg]
    """A container of a kind of its own."""


class StandIns:
    """One set of stand-ins. The same seed makes the same values, in memory of its own.

    `sources` are the CPU tensors that may be overwritten after a call, `destinations` what a call writes into.
    """

    def __init__(self, given: tuple[str, ...], device: torch.device, seed: int) -> None:
        import torch

        self._torch = torch
        self._random = random.Random(seed)
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.device = device
        self.sources: list[torch.Tensor] = []
        self.destinations: list[torch.Tensor] = []
        self.names: dict[str, Any] = {}
        vocabulary = {name: getattr(self, name) for name in VOCABULARY}
        for line in given:
            (first, *path), expression = parse(line)
            value = eval(compile(expression, "given", "eval"), {"__builtins__": {}, **vocabulary, **self.names})
            if not path:
                self.names[first] = value
                continue
            holder = self.names.setdefault(first, SimpleNamespace())
            for part in path[:-1]:
                if not hasattr(holder, part):
                    setattr(holder, part, SimpleNamespace())
                holder = getattr(holder, part)
            setattr(holder, path[-1], value)

    def size(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def tensor(self, *shape: int, dtype: str = "float32", pinned: bool = False) -> torch.Tensor:
        torch = self._torch
        kind = getattr(torch, dtype)
        if kind.is_floating_point or kind.is_complex:
            values = torch.randn(shape, generator=self._generator, device="cpu").to(kind)
        else:
            most = 2 if kind is torch.bool else 100
            values = torch.randint(0, most, shape, generator=self._generator, device="cpu").to(kind)
        if pinned and self.device.type == "cuda":
            values = values.pin_memory()
        self.sources.append(values)
        return values

    def buffer(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        zeros = self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=self.device)
        self.destinations.append(zeros)
        return zeros

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sources = [source for source in self.sources if source is not tensor]
        return tensor.to(self.device)

    def nested(self) -> dict[str, Any]:
        wide = self.tensor(12, 2 * self.size(2, 40))
        return {
            "dtypes": [
                self.tensor(self.size(1, 60), 3, dtype=dtype)
                for dtype in (
                    "float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8",
                    "uint8", "bool",
                )
            ],
            "layouts": (wide[:, ::2], wide.t(), wide[:1].expand(5, -1), self.tensor(2, 3, 4).permute(2, 0, 1)),
            "small": [self.tensor(), self.tensor(0, 7), [], (), {}],
            "other": [None, 7, "grid", 2.5, [self.tensor(3), [self.tensor(2, dtype="int64")]]],
            "containers": [_Pair(self.tensor(2), 1), OrderedDict(a=self.tensor(2)), _Stack([self.tensor(2)])],
        }  # fmt: skip

    def consume(self, *args: Any, **kwargs: Any) -> list[Any]:
        values = [*args, *kwargs.values()]
        is_tensor = self._torch.is_tensor
        return [value.to(self.device, non_blocking=True, copy=True) if is_tensor(value) else value for value in values]

    def blocks(self, number: int, size: int) -> SimpleNamespace:
        """Host and device memory of twice `number` blocks of `size` bytes, and a random pairing of `number` of each.

        Host to device or device to host, by the seed. `copy` is the plain way, one copy a block, and `copy_arrays` the
        same with addresses of arrays. On the CPU there are few and small ones: a parallel loop of torch's would start
        threads, which a process that forks must not have.
        """
        torch = self._torch
        if self.device.type == "cpu":
            number, size = min(number, 32), min(size, 256)
        to_cpu = bool(self._random.getrandbits(1))
        source, destination = self._sides((2 * number, size), to_cpu)
        picked = [self._picked(number) for _ in range(2)]
        src, dst = (side.data_ptr() + rows * size for side, rows in zip((source, destination), picked, strict=True))
        sizes = torch.full((number,), size, dtype=torch.int64, device="cpu")

        def copy(src: Any, dst: Any, sizes: Any, **_: Any) -> None:
            for start, end, length in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
                row, column = divmod(start - source.data_ptr(), size)
                to_row, to_column = divmod(end - destination.data_ptr(), size)
                destination[to_row, to_column : to_column + length].copy_(source[row, column : column + length])

        def copy_arrays(dst: int, src: int, sizes: int, count: int, *_: Any) -> int:
            batch = ((ctypes.c_int64 * count).from_address(address) for address in (src, dst, sizes))
            copy(*(torch.tensor(list(column), dtype=torch.int64, device="cpu") for column in batch))
            return 0

        def array(values: Any) -> Any:
            return values.numpy().astype("uint64")

        bases = (array(torch.tensor([side.data_ptr()], device="cpu")) for side in (source, destination))
        stream = 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream
        return SimpleNamespace(
            src=src,
            dst=dst,
            sizes=sizes,
            src_tensors=[source],
            dst_tensors=[destination],
            gpu_to_cpu=to_cpu,
            copy=copy,
            arrays=SimpleNamespace(src=array(src), dst=array(dst), sizes=array(sizes)),
            params=SimpleNamespace(**dict(zip(("src_bases", "dst_bases"), bases, strict=True)), stream_handle=stream),
            copy_arrays=copy_arrays,
            number=number,
        )

    def layers(self, number: int, size: int) -> SimpleNamespace:
        """Three pairs of tensors of twice `number` blocks of `size` bytes, the middle pair of keys and values, and a
        random mapping of `number` blocks to as many. Smaller on the CPU, and with a direction, as `blocks`.

        `swap` and `swap_sized` are what a release calls for a pair, the latter with the bytes of a block. `parts` are
        the pairs with keys and values apart.
        """
        if self.device.type == "cpu":
            number, size = min(number, 12), min(size, 256)
        to_cpu = bool(self._random.getrandbits(1))
        shapes = ((2 * number, size), (2, 2 * number, size), (2 * number, size))
        pairs = [self._sides(shape, to_cpu) for shape in shapes]
        parts = [part for pair in pairs for part in (zip(*pair, strict=True) if pair[0].dim() == 3 else [pair])]

        def swap_sized(src: torch.Tensor, dst: torch.Tensor, size: int, mapping: torch.Tensor) -> None:
            src, dst = src.view(-1), dst.view(-1)
            for read, write in mapping.tolist():
                dst[write * size : (write + 1) * size].copy_(src[read * size : (read + 1) * size])

        def swap(src: torch.Tensor, dst: torch.Tensor, mapping: torch.Tensor) -> None:
            swap_sized(src, dst, src.stride(0), mapping)

        return SimpleNamespace(
            src_tensors=[src for src, _ in pairs],
            dst_tensors=[dst for _, dst in pairs],
            halved=[src.dim() == 3 for src, _ in pairs],
            parts=SimpleNamespace(src=[src for src, _ in parts], dst=[dst for _, dst in parts]),
            sizes=[size for _ in parts],
            mapping=self._torch.stack([self._picked(number) for _ in range(2)], dim=1),
            swap=swap,
            swap_sized=swap_sized,
        )

    def _picked(self, number: int) -> torch.Tensor:
        """`number` of twice as many blocks, in random order."""
        return self._torch.randperm(2 * number, generator=self._generator, device="cpu")[:number]

    def _sides(self, shape: tuple[int, ...], to_cpu: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Random bytes on one side of a swap, and zeros on the other."""
        host = self.tensor(*shape, dtype="int8", pinned=True)
        device = self._torch.zeros_like(host, device=self.device)
        source, destination = (device, host) if to_cpu else (host, device)
        if to_cpu:
            device.copy_(host)
            host.zero_()
        # The host memory of a swap is not overwritten behind a running copy: vLLM waits for the job's event.
        self.sources = [kept for kept in self.sources if kept is not host]
        self.destinations.append(destination)
        return source, destination
