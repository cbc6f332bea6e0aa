"""The pages of docs/fixes are those that patches.toml and the table of releases make."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from h2d_patch.manifest import load
from h2d_patch.releases import shipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import fix_pages  # noqa: E402

USERS = """
manifest = 1
[patch.my-fix]
why = "positions of our own model."
[[patch.my-fix.target]]
function = "our.model:Model.forward"
[[patch.my-fix.target.rewrite]]
find = "SRC.to(DEV, non_blocking=True)"
put = "to_device(SRC, DEV)"
"""


def test_the_pages_are_as_the_tool_writes_them_and_there_are_no_others() -> None:
    made = fix_pages.pages(load(), shipped())
    there = {path.name: path.read_text(encoding="utf-8") for path in fix_pages.FOLDER.glob("*.md")}
    assert there == made, "`make docs` makes them anew"


@pytest.mark.parametrize("fix", load().fixes.values(), ids=lambda fix: fix.id)
def test_a_page_says_why_where_what_the_risks_are_and_until_when(fix) -> None:  # type: ignore[no-untyped-def]
    text = fix_pages.page(load(), fix, shipped())
    flowing = " ".join(text.split())
    assert all(said in flowing for said in (fix.why, fix.risk, fix.retire, fix.upstream.partition("#")[2]))
    for target in fix.targets:
        assert f"`{target.module}`<br>`{target.qualname}`" in text
    for rewrite in (rewrite for target in fix.targets for rewrite in target.rewrites):
        assert all(f"- {line}" in text for line in rewrite.find.text.splitlines())
        assert f"+ {rewrite.put.text}" in text
    assert ("stays `off`, and says so" in flowing) is fix.removes_wait


def test_a_release_that_has_the_fault_last_is_the_one_before_the_first_without() -> None:
    manifest, table = load(), shipped()
    assert "from 0.30.0 on" in fix_pages.page(manifest, manifest.fixes["multimodal-h2d"], table)
    assert "from 0.24.0 on" in fix_pages.page(manifest, manifest.fixes["mla-context"], table)
    assert f"looked at, {max(table.known)}, still has the fault" in fix_pages.page(
        manifest, manifest.fixes["kv-swap"], table
    )


def test_a_fix_of_a_user_s_own_has_a_page_without_what_it_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(USERS)
    manifest = load(tmp_path / "ours.toml")
    text = fix_pages.page(manifest, manifest.fixes["my-fix"], shipped())
    assert "- SRC.to(DEV, non_blocking=True)\n+ to_device(SRC, DEV)" in text and "of any release" in text


def test_every_link_leads_somewhere() -> None:
    for path in [*fix_pages.FOLDER.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text):
            place = (path.parent / target).resolve() if target else path
            assert place.exists(), f"{path.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in anchors, f"{path.name}: {target}#{anchor}"
