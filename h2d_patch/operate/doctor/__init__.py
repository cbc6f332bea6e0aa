"""`h2d-patch doctor`: why it is not working. Needs no torch, no vLLM and no GPU, and changes nothing."""

from __future__ import annotations

from .examination import examine, exit_status
from .finding import OK, PROBLEM, WARNING, Finding
from .shown import as_json, as_text

__all__ = ["OK", "PROBLEM", "WARNING", "Finding", "as_json", "as_text", "examine", "exit_status"]
