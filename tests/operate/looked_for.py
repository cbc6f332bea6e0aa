"""Findings of `doctor`, looked through by tests."""

from __future__ import annotations

import re

from h2d_patch.operate.doctor.finding import Finding


def found(findings: list[Finding], level: str, text: str) -> Finding:
    matching = [one for one in findings if one.level == level and re.search(text, one.found)]
    assert matching, f"no {level} that says {text!r} in: " + "\n".join(map(str, findings))
    return matching[0]
