"""The slices of an A/B as a picture: one panel for each measure, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..bench.plot import require_matplotlib, save
from ..settings import ConfigurationError
from .ab_report import ARMS, Report

_COLOURS: Final = {False: "tab:red", True: "tab:blue"}


def draw(report: Report, path: Path) -> None:
    """Raises ConfigurationError without matplotlib, without a slice, or where `path` cannot be written."""
    require_matplotlib()
    from matplotlib.figure import Figure

    slices, measures = report.outcome.slices, report.measures
    if not measures:
        raise ConfigurationError("--plot: no slice was measured; expected one at least")
    figure = Figure(figsize=(9, 1.2 + 2.1 * len(measures)), layout="constrained")
    panels = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    for panel, measure in zip(panels, measures, strict=True):
        for one in report.outcome.measured:
            value = measure.value(one)
            times = [slices.settled(one.number) - slices.start, slices.begin(one.number + 1) - slices.start]
            colour = "0.7" if one.left_out else _COLOURS[one.on]
            panel.axvspan(*times, color=colour, alpha=0.12, linewidth=0)
            if value is not None:
                panel.plot(times, [value * measure.scale] * 2, color=colour, linewidth=2.5, solid_capstyle="butt")
        ratio = report.ratios[measure.key]
        found = "" if ratio is None else f": on/off {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        panel.set_title(f"{measure.name}{found}", fontsize="medium", loc="left")
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.3)
    for on, name in ARMS.items():
        panels[0].plot([], [], color=_COLOURS[on], linewidth=2.5, label=name)
    panels[0].plot([], [], color="0.7", linewidth=2.5, label="left out")
    panels[0].legend(loc="upper right", ncols=3, fontsize="small")
    panels[-1].set_xlabel("s")
    same = ", both arms the original" if slices.same else ""
    figure.suptitle(f"A/B of {report.outcome.plan.fix}{same}, server {report.outcome.server}")
    save(figure, path)
