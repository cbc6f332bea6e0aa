"""The findings, for a person and for a ticket. Of the environment, only our variables and VLLM_PLUGINS are shown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .environment import ours
from .examination import Examination
from .finding import OK, PROBLEM, WARNING, Finding

SCHEMA = 1
_WIDTH = 118
_MARKS = {OK: "ok", WARNING: "warning", PROBLEM: "PROBLEM"}


def as_json(seen: Examination, environ: Mapping[str, str], status: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "exit_status": status,
        "versions": dict(seen.versions),
        "environment": ours(environ),
        "findings": [asdict(finding) for finding in seen.findings],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """A line or more for each, as they were found, and how many of each kind."""
    about = max((len(finding.about) for finding in findings), default=0)
    left = " " * (about + 11)
    lines = []
    for finding in findings:
        head = f"{_MARKS[finding.level]:<7}  {finding.about:<{about}}  "
        lines += textwrap.wrap(finding.found, _WIDTH, initial_indent=head, subsequent_indent=left)
        if finding.do and finding.level != OK:
            lines += textwrap.wrap(finding.do, _WIDTH, initial_indent=f"{left}→ ", subsequent_indent=f"{left}  ")
    count = Counter(finding.level for finding in findings)
    parts = [f"{count[level]} {level}{'s' if count[level] > 1 else ''}" for level in (PROBLEM, WARNING) if count[level]]
    return "\n".join([*lines, "", f"{', '.join(parts)}." if parts else "Nothing is wrong."])
