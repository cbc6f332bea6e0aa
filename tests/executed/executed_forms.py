"""Run every form and write down, in executed.json, which were run and why others were not.

    python tests/executed/executed_forms.py        (as `make releases` does; needs torch and Triton)

Exit status 1, and nothing written, where a fixed function does something else than the release's own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cases_lists  # noqa: F401
import cases_models  # noqa: F401
import cases_runner  # noqa: F401
import cases_swaps  # noqa: F401
from forms import Form, forms
from proof import NotRun, prove, said

FILE = Path(__file__).with_name("executed.json")


def document(executed: Mapping[Form, str]) -> str:
    """The text of the file: a line for each form."""
    found: dict[str, dict[str, str]] = {}
    for form, text in executed.items():
        found.setdefault(form.target, {})[form.source] = text
    return json.dumps({"about": "made by tests/executed/executed_forms.py", "executed": found}, indent=2) + "\n"


def main() -> int:
    executed, failed = {}, 0
    for form in forms():
        try:
            prove(form)
            executed[form] = said(form)
        except NotRun as reason:
            executed[form] = str(reason)
            print(f"executed: {form}: {reason}", file=sys.stderr)
        except Exception:
            failed += 1
            print(f"executed: {form}\n{traceback.format_exc(limit=-3)}", file=sys.stderr)
    print(f"{len(forms())} forms, {sum(text.startswith('yes') for text in executed.values())} run, {failed} wrong")
    if not failed:
        FILE.write_text(document(executed), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
