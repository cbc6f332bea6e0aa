"""A page for each fix, docs/fixes/ID.md, and a list of them: why, what it changes and where, risks, when to retire it.

    make docs            (.venv/bin/python tools/fix_pages.py)

Made from patches.toml and the table of releases (h2d_patch/releases.json), the same for the same. Pages of fixes that
are gone are removed.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from packaging.version import Version  # noqa: E402
from releases import own, spans, table_lines  # noqa: E402

from h2d_patch.manifest import Fix, Manifest, load  # noqa: E402
from h2d_patch.patching.recognise import Target, Verdict  # noqa: E402
from h2d_patch.releases import Releases, shipped  # noqa: E402

FOLDER = ROOT / "docs/fixes"
_MADE = "<!-- Made by `make docs` from patches.toml and the table of releases; not to be edited. -->"

_ALSO_ORDERED = (
    "The copy that it takes out also kept other buffers of a step in order. Where nothing else does (pooling models "
    "and pipeline parallelism without asynchronous scheduling) it stays `off`, and says so "
    "([why](../copies.md#where-other-buffers-depend-on-the-wait))."
)
_IF_IT_RAISES = (
    "A copy of ours that raises is followed by the original copy, and the fix is off in that process from then on."
)


def pages(manifest: Manifest, releases: Releases) -> dict[str, str]:
    """The text of every page, by its name."""
    made = {f"{fix.id}.md": page(manifest, fix, releases) for fix in manifest.fixes.values()}
    return {"README.md": index(manifest, releases), **made}


def index(manifest: Manifest, releases: Releases) -> str:
    rows = []
    for fix in manifest.fixes.values():
        default = "on" if fix.default else "off"
        rows.append([f"[`{fix.id}`]({fix.id}.md)", fix.why, default, _where(manifest, fix, releases) or "–"])
    lines = ["# The fixes", "", _MADE, "", "A page for each: why, what it changes and where, risks, when to retire it."]
    lines += ["[`operate.md`](../operate.md) says how to enable, measure and undo them.", ""]
    return "\n".join([*lines, *table_lines(["fix", "why", "by default", "vLLM releases with the fault"], rows)]) + "\n"


def page(manifest: Manifest, fix: Fix, releases: Releases) -> str:
    newest = max(releases.known)
    lines = [f"# {fix.id}", "", _MADE, "", fix.why, ""]
    default = "`H2D_PATCH=1` includes it" if fix.default else f"off by default; `H2D_PATCH=all,{fix.id}` includes it"
    where = _where(manifest, fix, releases)
    facts = [["by default", default], ["vLLM releases with the fault", where or f"none up to {newest}"]]
    facts += [["upstream", _link(fix.upstream)]] if fix.upstream else []
    lines += table_lines(["", ""], facts)
    lines += ["", "## What it changes", "", "A name in capitals stands for any expression; `+` calls functions of"]
    lines += ["`h2d_patch.copies`. Everything else in the function stays the release's own.", ""]
    for number, ((before, after), targets) in enumerate(_exchanges(fix).items(), 1):
        lines += [*([] if number == 1 else [""]), "```diff"]
        lines += [f"- {line}" for line in before.splitlines()] + [f"+ {line}" for line in after.splitlines()]
        lines += ["```", ""]
        lines += _places(manifest, fix, targets, releases)
    lines += ["", "## Risks", ""]
    lines += _paragraph(fix.risk)
    lines += _paragraph(_ALSO_ORDERED) if fix.removes_wait else []
    lines += _paragraph(_IF_IT_RAISES)[:-1]
    lines += ["", "## When to retire it", ""]
    lines += _paragraph(f"{_until(manifest, fix, releases)} {fix.retire}".strip())[:-1]
    lines += ["", "## Measure it, turn it off", "", "```console"]
    lines += [f"$ h2d-patch ab {fix.id} -- COMMAND       # COMMAND puts load on the server"]
    lines += [f"$ h2d-patch switch {fix.id} off          # in the running server, within 2 s"]
    lines += [f"$ H2D_PATCH=all,-{fix.id} vllm serve …   # from the next start on", "```"]
    return "\n".join(lines) + "\n"


def _exchanges(fix: Fix) -> dict[tuple[str, str], list[Target]]:
    """The targets by what is exchanged in them for what."""
    found: dict[tuple[str, str], list[Target]] = {}
    for target in fix.targets:
        if target.replace is not None:
            pairs = [(f"the function {target.qualname}", f"the function {target.replace.put}")]
        else:
            pairs = [(rewrite.find.text, rewrite.put.text) for rewrite in target.rewrites]
        for pair in dict.fromkeys(pairs):
            found.setdefault(pair, []).append(target)
    return found


def _places(manifest: Manifest, fix: Fix, targets: list[Target], releases: Releases) -> Iterator[str]:
    names = {id(target): name for name, target in own(manifest, fix)}
    versions = list(releases.known)
    rows = []
    for target in targets:
        name = names.get(id(target))
        applies, upstream = f"vLLM {target.span}; another package's", ""
        if name is not None:
            applies, upstream = (
                spans((v for v, release in releases.known.items() if release.verdicts[name] is verdict), versions)
                for verdict in (Verdict.APPLIES, Verdict.UPSTREAM)
            )
        note = target.supersedes or target.note or ""
        rows.append([f"`{target.module}`<br>`{target.qualname}`", applies or "–", upstream or "–", note])
    columns = [0, 1, *(column for column in (2, 3) if any(row[column] not in ("", "–") for row in rows))]
    header = ["function", "vLLM releases", "upstream's own", "note"]
    yield from table_lines([header[c] for c in columns], [[row[c] for c in columns] for row in rows])


def _applies(manifest: Manifest, fix: Fix, releases: Releases) -> list[Version]:
    names = [name for name, _ in own(manifest, fix)]
    return [
        version
        for version, release in releases.known.items()
        if any(release.verdicts[name] is Verdict.APPLIES for name in names)
    ]


def _where(manifest: Manifest, fix: Fix, releases: Releases) -> str:
    return spans(_applies(manifest, fix, releases), list(releases.known))


def _until(manifest: Manifest, fix: Fix, releases: Releases) -> str:
    newest, applies = max(releases.known), _applies(manifest, fix, releases)
    if not applies:
        return f"No release up to {newest} has the fault."
    if applies[-1] == newest:
        return f"The last release that was looked at, {newest}, still has the fault."
    after = next(version for version in releases.known if version > applies[-1])
    return f"The last release with the fault is {applies[-1]}; from {after} on `check` says `upstream` or `absent`."


def _paragraph(text: str) -> list[str]:
    """Its lines, and an empty one."""
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""] if text else []


def _link(upstream: str) -> str:
    """`owner/repo#number` as a link; GitHub leads to the pull request where the number is one."""
    repository, _, number = upstream.partition("#")
    return f"[{upstream}](https://github.com/{repository}/issues/{number})" if number.isdigit() else upstream


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    made = pages(load(), shipped())
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
