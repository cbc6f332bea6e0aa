"""Findings of `doctor`, looked through by tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from h2d_patch.operate import doctor
from h2d_patch.operate.doctor.finding import Finding

NOWHERE = Path("/nowhere")


def found(findings: list[Finding], level: str, text: str) -> Finding:
    matching = [one for one in findings if one.level == level and re.search(text, one.found)]
    assert matching, f"no {level} that says {text!r} in: " + "\n".join(map(str, findings))
    return matching[0]


def examined(proc: Path = NOWHERE, **environ: str) -> list[Finding]:
    """`proc`: where servers are looked for; other tests may run some."""
    return doctor.examine({**os.environ, **environ}, proc=proc).findings
