"""What one look at one thing has found."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """`about`: what was looked at, in a word; `do`: what to do about it. `bad_input`: a setting or a file is wrong."""

    level: str
    about: str
    found: str
    do: str = ""
    bad_input: bool = False
