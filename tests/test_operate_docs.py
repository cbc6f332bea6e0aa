"""What an operator is told is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

from h2d_patch.cli import _parser
from h2d_patch.operate.exporter import LOOPBACK
from h2d_patch.operate.prometheus import FAMILIES
from h2d_patch.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
OPERATE = (ROOT / "docs/operate.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_metric_is_described_and_no_other() -> None:
    assert set(re.findall(r"^\| `(h2d_patch_\w+)`", OPERATE, re.MULTILINE)) == set(FAMILIES)


def test_every_variable_that_is_named_is_read() -> None:
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"\bH2D_PATCH(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8")))
        assert named <= set(VARIABLES), path.name


def test_every_command_that_is_shown_is_one() -> None:
    commands = next(iter(action.choices for action in _parser()._actions if action.choices and action.dest != "help"))
    for text in (OPERATE, SECURITY):
        for name in re.findall(r"(?:`|\$ )h2d-patch ([a-z]+)\b", text):
            assert name in commands, name
    assert _parser().parse_args(["export", "--port", "0"]).host == LOOPBACK and LOOPBACK in SECURITY


def test_fallback_reasons_that_are_explained_are_ones_that_are_given() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "h2d_patch").rglob("*.py"))
    table = OPERATE[OPERATE.index("Calls that are left to the original (`fallbacks`)") :]
    rows = [row for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) if row.strip(" -") and row != "reason"]
    said = [part.strip() for row in rows for part in re.split(r", (?=a|d|r|n)| …", row) if part.strip()]
    assert len(said) > 8
    for reason in said:
        assert reason.removesuffix(" of another form") in sources, reason


def test_the_limits_that_are_promised_are_those_of_the_program() -> None:
    from h2d_patch.copies import profile_file
    from h2d_patch.manifest import _MOST_BYTES
    from h2d_patch.operate import exporter, prometheus

    assert _MOST_BYTES == profile_file._MOST_BYTES == 4 << 20 and "4 MiB" in SECURITY
    assert f"At most {exporter._MOST_AT_ONCE} clients" in SECURITY
    assert f"let go of after {exporter._CLIENT_S:.0f} seconds" in SECURITY
    assert prometheus.RECENT_S == 600 and "for ten minutes after they were written" in OPERATE
    assert f"at most {prometheus._MOST_REASONS} of each function" in OPERATE
