"""The results of `bench copies` and `bench swap` as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from h2d_patch.copies.profile import DIRECTIONS
from h2d_patch.settings import ConfigurationError

_NAMES: Final = {"original": "original", "upstream": "upstream's fix", "ours": "h2d_patch"}
_COLOURS: Final = {"original": "tab:red", "upstream": "tab:orange", "ours": "tab:blue"}

_BLOCKS: Final = (16, 256, 4096)
_SWAP_ARMS: Final = {
    "driver batch": ".-r",
    "upstream 12": ".-y",
    "bulk 2": ".--c",
    "bulk 4": ".:c",
    "bulk 8": ".:b",
    "triton 16": ".:g",
    "triton 64": ".--g",
    "chosen": ".-k",
}


def require_matplotlib() -> None:
    """Raises ConfigurationError without it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"--plot: {error}; expected it, as in: pip install matplotlib") from None


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Host time of pageable copies by size, a panel for each queue depth, and of M-RoPE copies by columns.

    Raises ConfigurationError without matplotlib, or where `path` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    if not any(row["kind"] == "pageable" and "0" in row["queued"] for row in result["rows"]):
        raise ConfigurationError("--plot: too few cases were measured; expected pageable copies among them")

    depths = [str(ms) for ms in result["queued_ms"]]
    figure = Figure(figsize=(4.2 * (len(depths) + 1), 4.2), layout="constrained")
    panels = figure.subplots(1, len(depths) + 1)
    pageable = [row for row in result["rows"] if row["kind"] == "pageable"]
    for panel, depth in zip(panels, depths, strict=False):
        for arm, name in _NAMES.items():
            panel.plot(*_points(pageable, depth, arm, 1024), ".-", color=_COLOURS[arm], label=name)
        panel.set_title("pageable, idle GPU" if depth == "0" else f"pageable, {depth} ms queued")
        panel.set_xlabel("KiB")
    mrope = [row for row in result["rows"] if row["kind"] == "mrope"]
    last = panels[-1]
    for depth, style in {depths[0]: ".-", depths[-1]: ".:"}.items():
        for arm, name in _NAMES.items():
            label = f"{name}, {'idle' if depth == '0' else f'{depth} ms queued'}"
            last.plot(*_points(mrope, depth, arm, 24), style, color=_COLOURS[arm], label=label)
    last.set_title("M-RoPE positions [3, :n], int64")
    last.set_xlabel("n")
    panels[0].set_ylabel("µs until the call returns (median)")
    for panel in panels:
        if panel.lines and any(len(line.get_xdata()) for line in panel.lines):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0].legend()
    last.legend(fontsize="x-small")
    gpu = result.get("machine", {}).get("gpu") or "no GPU: the numbers mean nothing"
    figure.suptitle(f"Host time of one copy to the device ({gpu})")
    save(figure, path)


def draw_swap(result: Mapping[str, Any], path: Path) -> None:
    """GB/s by size of a block: a panel for each direction and some numbers of blocks.

    Raises ConfigurationError without matplotlib, or where `path` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    there = sorted({row["blocks"] for row in result["rows"]})
    counts = [number for number in _BLOCKS if number in there] or there[-len(_BLOCKS) :]
    figure = Figure(figsize=(4.2 * len(counts), 7.6), layout="constrained")
    panels = figure.subplots(2, len(counts), squeeze=False)
    for line, (gpu_to_cpu, direction) in enumerate(DIRECTIONS.items()):
        for column, blocks in enumerate(counts):
            panel = panels[line][column]
            rows = [row for row in result["rows"] if row["blocks"] == blocks and row["gpu_to_cpu"] is gpu_to_cpu]
            for arm, style in _SWAP_ARMS.items():
                with_arm = [row for row in rows if arm in row["arms"]]
                points = [row["bytes"] / 1024 for row in with_arm], [row["arms"][arm]["gbps"] for row in with_arm]
                if with_arm:
                    panel.plot(*points, style, label=arm)
            if (limit := result["one_copy"].get(direction)) is not None:
                panel.axhline(limit["gbps"], color="grey", linewidth=0.8, label="one large copy")
            panel.set_title(f"{direction}, {blocks} blocks")
            panel.set_xlabel("KiB a block")
            if rows:
                panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
        panels[line][0].set_ylabel("GB/s (median)")
    handles = {
        text: handle for panel in panels.flat for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    panels[0][0].legend(handles.values(), handles.keys(), fontsize="x-small")
    gpu = result.get("machine", {}).get("gpu") or "no GPU: the numbers mean nothing"
    figure.suptitle(f"Scattered blocks between CPU and GPU ({gpu})")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Raises ConfigurationError where `path` cannot be written."""
    try:
        with path.open("wb") as file:  # by its name matplotlib would choose another where that has no suffix
            figure.savefig(file, dpi=120, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path}: {error}; expected a file to write, like copies.png") from None


def _points(rows: list[Mapping[str, Any]], depth: str, arm: str, unit: int) -> tuple[list[float], list[float]]:
    with_depth = [row for row in rows if depth in row["queued"]]
    return [r["bytes"] / unit for r in with_depth], [r["queued"][depth][arm]["median_us"] for r in with_depth]
