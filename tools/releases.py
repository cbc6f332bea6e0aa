"""Look at every vLLM release: the table that h2d_patch ships, docs/releases.md, and what changed since the last time.

    make releases        (.venv/bin/python tools/releases.py [--drop] [--offline] [--jobs N] [--python PATH])

Asks the package index for vLLM's final releases, fetches those that are not in the cache of tools/fetch_release.py
(only their sources are kept), runs `h2d-patch check` on each, and writes h2d_patch/releases.json and
docs/releases.md, the same for the same manifest and releases. A new release takes this command and a commit. What was
yanked when it was fetched is left aside. With --python, every function to which a fix applies is executed, with the fix
and without (tests/executed). Exit status 1 where a release was refused, could not be had, or took longer than 3 s, or
where a fixed function did something else. Standard library and h2d_patch only.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from fetch_release import FetchFailed, cache, fetch, is_yanked  # noqa: E402
from packaging.version import Version  # noqa: E402

from h2d_patch.manifest import Fix, Manifest, load  # noqa: E402
from h2d_patch.patching.recognise import Target, Verdict  # noqa: E402
from h2d_patch.releases import FILE, LETTERS, NONE, SCHEMA, Release, Releases, named, parse  # noqa: E402
from h2d_patch.report.check import Checked, Site, check  # noqa: E402

PAGE = ROOT / "docs/releases.md"
EXECUTED = ROOT / "tests/executed/executed.json"
OLDEST = Version("0.8.0")  # the first with the V1 engine as its default, which is what the fixes are for
MOST_S = 3.0


@dataclass
class Looked:
    """What `check` said of one release. `problem`: why nothing was."""

    release: str
    rows: list[Checked] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""
    yanked: bool = False


def on_the_index() -> list[str]:
    """Final releases from OLDEST on, as pip sees them. Raises FetchFailed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "vllm"]
    done = subprocess.run([*command, "--ignore-requires-python"], capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise FetchFailed(f"the package index: pip exited {done.returncode} and said: {said[:400]}")
    versions = sorted(Version(text.strip()) for text in found.group(1).split(","))
    return [str(version) for version in versions if version >= OLDEST and not version.is_prerelease]


def look_at(release: str, drop: bool = False, offline: bool = False) -> Looked:
    """Checks one release's own sources against the manifest, knowing nothing else of it."""
    folder = cache() / f"vllm-{release}"
    was_there = folder.is_dir()
    if offline and not was_there:
        return Looked(release, problem=f"vLLM {release}: its sources are not in {cache()}")
    try:
        folder = fetch(release)
    except (FetchFailed, OSError) as problem:
        return Looked(release, problem=str(problem))
    try:
        if is_yanked(folder):
            return Looked(release, yanked=True)
        manifest = load()
        start = time.process_time()  # a machine may be busy with something else
        site = Site(folder)
        rows = list(check(manifest, site, releases=Releases()))
        looked = Looked(release, rows, time.process_time() - start)
        if site.release() != release:
            looked.problem = f"vLLM {release}: its sources call themselves {site.release()}"
        return looked
    finally:
        if drop and not was_there:
            shutil.rmtree(folder, ignore_errors=True)


def table(manifest: Manifest, looked: Iterable[Looked]) -> Releases:
    """The table of what was seen; `check` has one row for each target, in the order of the manifest."""
    names = {id(target): name for name, target in named(manifest.targets())}
    known = {}
    for one in looked:
        verdicts: dict[str, Verdict] = {}
        sources: dict[str, str | None] = {}
        for (_, target), row in zip(manifest.targets(), one.rows, strict=True):
            if name := names.get(id(target)):
                verdicts[name] = row.verdict
                sources[target.function] = row.source
        known[Version(one.release)] = Release(sources, verdicts)
    return Releases(dict(sorted(known.items())))


def applying(releases: Releases) -> dict[str, dict[str, list[Version]]]:
    """Of each target the sources that it applies to, each with the releases that have it."""
    found: dict[str, dict[str, list[Version]]] = {}
    for version, release in releases.known.items():
        for name, verdict in release.verdicts.items():
            sources = found.setdefault(name, {})
            if verdict is Verdict.APPLIES:
                sources.setdefault(release.sources[name.split()[1]] or "", []).append(version)
    return found


def fewest(sources: Mapping[str, Mapping[str, Iterable[Version]]]) -> list[str]:
    """As few releases as have every source of every target, those with the most that no other has first."""
    left = [set(releases) for each in sources.values() for releases in each.values()]
    chosen: list[Version] = []
    while left:
        counts = collections.Counter(release for releases in left for release in releases)
        chosen.append(max(counts, key=lambda release: (counts[release], release)))
        left = [releases for releases in left if chosen[-1] not in releases]
    return [str(release) for release in chosen]


def dump(releases: Releases) -> str:
    """The text of the table: a line for each release, so that a new one adds a line, and the sources that are new."""
    first = next(iter(releases.known.values()))
    functions, names = list(first.sources), list(first.verdicts)
    letters = {verdict: letter for letter, verdict in LETTERS.items()}
    hashes: dict[str, list[str]] = {}
    for function in functions:
        found = (release.sources[function] for release in releases.known.values())
        hashes[function] = list(dict.fromkeys(filter(None, found)))
    rows = {}
    for version, release in releases.known.items():
        own = [(function, release.sources[function]) for function in functions]
        numbers = [NONE if source is None else str(hashes[function].index(source)) for function, source in own]
        verdicts = "".join(letters[release.verdicts[name]] for name in names)
        rows[str(version)] = {"sources": " ".join(numbers), "verdicts": verdicts}
    parts = [
        f'"about": {json.dumps("made by `make releases`, read by h2d_patch/releases.py")}',
        f'"schema": {SCHEMA}',
        f'"sources": {_lines(hashes)}',
        '"targets": [\n    ' + ",\n    ".join(map(json.dumps, names)) + "\n  ]",
        f'"releases": {_lines(rows)}',
    ]
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def _lines(values: Mapping[str, object]) -> str:
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return "{\n    " + ",\n    ".join(lines) + "\n  }"


def spans(releases: Iterable[Version], among: Iterable[Version]) -> str:
    """`0.8.0–0.10.2, 0.12.0`: runs of `releases` that follow one another in `among`."""
    wanted = set(releases)
    runs = [list(run) for inside, run in itertools.groupby(among, wanted.__contains__) if inside]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def recorded() -> dict[str, dict[str, str]]:
    """Of each target and source, whether tests/executed ran it: "yes", "yes; but for …" or "no: …"."""
    try:
        executed: dict[str, dict[str, str]] = json.loads(EXECUTED.read_text(encoding="utf-8"))["executed"]
    except FileNotFoundError:
        return {}
    return executed


def _executed(sources: Iterable[str], said: Mapping[str, str]) -> str:
    """How many of a target's forms were run, and what is said of those that were not, or not all."""
    texts = [said.get(source, "no: it is new") for source in sources]
    if not texts:
        return ""
    done = sum(text.startswith("yes") for text in texts)
    count = "all" if done == len(texts) else f"{done} of"
    reasons = dict.fromkeys(text.removeprefix("no: ").removeprefix("yes; ") for text in texts if text != "yes")
    return "; ".join([f"{count} {len(texts)}" if len(texts) > 1 else "yes" if done else "no", *reasons])


def page(manifest: Manifest, releases: Releases) -> str:
    """docs/releases.md."""
    sources, executed = applying(releases), recorded()
    fixes = [fix for fix in manifest.fixes.values() if any(True for _ in own(manifest, fix))]
    versions = list(releases.known)
    rows = {version: [_cell(manifest, fix, releases.known[version]) for fix in fixes] for version in versions}
    header = ["vLLM", *(f"`{fix.id}`" + ("" if fix.default else " (off by default)") for fix in fixes)]
    lines = [
        "# Which fixes apply to which vLLM release",
        "",
        "<!-- Made by `make releases` from patches.toml and the releases' own sources; not to be edited. -->",
        "",
        f"Every final release from {versions[0]} to {versions[-1]}, as `h2d-patch check` judges its sources.",
        "",
        "- **applies**: it has the fault, and the fix mends it; in how many functions, where it is more than one.",
        "- **upstream**: it has vLLM's own fix.",
        "- **–**: it has no such function, or nothing in it that this fix mends.",
        "- **refused**: its source is not one that we know, and stays as it is.",
        "- **executed**: of how many of the forms that a function has, where the fix applies to it,",
        "  the release's own and the fixed one were run on the same inputs, and gave and did the same. On the CPU,",
        "  with stand-ins for all that the function touches ([`tests/executed`](../tests/executed/proof.py)).",
        "",
        "What is installed decides, not this page. Where a function is not the release's own, because a vendor patched",
        "it, `h2d-patch check` and `h2d-patch status` say so, and it is judged by what its source means. A release",
        f"later than {versions[-1]} is judged by its sources alone; `h2d-patch check` and the log say that it is new.",
        "",
        *table_lines(header, [[spans(run, versions), *cells] for cells, run in _runs(rows)]),
        "",
        "## Function by function",
    ]
    for fix in fixes:
        lines += ["", f"### {fix.id}", "", fix.why, ""]
        cells = []
        for name, target in own(manifest, fix):
            found = [
                spans((v for v, release in releases.known.items() if release.verdicts[name] is verdict), versions)
                for verdict in (Verdict.APPLIES, Verdict.UPSTREAM, Verdict.REFUSED)
            ]
            run = _executed(sources[name], executed.get(name, {}))
            note = target.supersedes or target.note or ""
            cells.append([f"`{target.module}`<br>`{target.qualname}`", *found, run, note])
        columns = ["function", "applies", "upstream", "refused", "executed", "note"]
        filled = [column for column in range(6) if column < 2 or any(row[column] for row in cells)]
        lines += table_lines([columns[c] for c in filled], [[row[c] or "–" * (c < 5) for c in filled] for row in cells])
        others = [target.function for target in fix.targets if target.module.partition(".")[0] != "vllm"]
        if others:
            done = [executed.get(f"{fix.id} {function}", {}) for function in others]
            texts = [f"`{one}` ({_executed(said, said) or 'no'})" for one, said in zip(others, done, strict=True)]
            lines += [
                "",
                "And, of whatever version is installed beside vLLM (in brackets: of how many of its forms, in the",
            ]
            lines += [f"versions that vLLM asks for, it was executed): {', '.join(texts)}."]
    return "\n".join(lines) + "\n"


def own(manifest: Manifest, fix: Fix) -> Iterator[tuple[str, Target]]:
    return named((owner, target) for owner, target in manifest.targets() if owner is fix)


def _cell(manifest: Manifest, fix: Fix, release: Release) -> str:
    counts = collections.Counter(release.verdicts[name] for name, _ in own(manifest, fix))
    said = (Verdict.REFUSED, Verdict.APPLIES, Verdict.UPSTREAM)
    parts = [v.value + (f" {counts[v]}" if counts[v] > 1 else "") for v in said if counts[v]]
    return ", ".join(parts) or "–"


def _runs(rows: Mapping[Version, list[str]]) -> Iterator[tuple[list[str], list[Version]]]:
    """Releases that follow one another with the same cells."""
    for cells, run in itertools.groupby(rows.items(), lambda item: item[1]):
        yield cells, [version for version, _ in run]


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def changes(before: Releases, after: Releases) -> list[str]:
    """What is not as it was in the table before, a line each."""
    if not before.known:
        return ["there was none"]
    lines = []
    versions = list(after.known)
    old_names = {name for release in before.known.values() for name in release.verdicts}
    new_names = {name for release in after.known.values() for name in release.verdicts}
    lines += [f"target gone: {name}" for name in sorted(old_names - new_names)]
    lines += [f"target new: {name}" for name in sorted(new_names - old_names)]
    lines += [f"release gone: {version}" for version in before.known if version not in after.known]
    for version in versions:
        if version not in before.known:
            lines += _new(version, after, versions[: versions.index(version)])
    moved: dict[str, list[Version]] = {}
    for version, release in after.known.items():
        then = before.known.get(version)
        if then is None:
            continue
        for name, verdict in release.verdicts.items():
            if name in then.verdicts and then.verdicts[name] is not verdict:
                moved.setdefault(f"{name}: {then.verdicts[name].value} → {verdict.value}", []).append(version)
        for function, source in release.sources.items():
            if function in then.sources and then.sources[function] != source:
                moved.setdefault(f"{function}: another source than before", []).append(version)
    return lines + [f"{what} in {spans(where, versions)}" for what, where in moved.items()]


def _new(version: Version, after: Releases, earlier: Sequence[Version]) -> list[str]:
    release = after.known[version]
    counts = collections.Counter(verdict.value for verdict in release.verdicts.values())
    lines = [f"new release {version}: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))]
    if earlier:
        last = after.known[earlier[-1]]
        for name, verdict in release.verdicts.items():
            if verdict is not last.verdicts[name]:
                lines.append(f"  {name}: {last.verdicts[name].value} in {earlier[-1]}, {verdict.value} here")
        other = [function for function, source in release.sources.items() if source != last.sources[function]]
        lines += [f"  {function}: another source than in {earlier[-1]}" for function in other]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drop", action="store_true", help="remove sources that were fetched, once they are read")
    parser.add_argument("--offline", action="store_true", help="the releases of the table there is, from the cache")
    parser.add_argument("--python", metavar="PATH", help="an interpreter with torch and Triton, to run every form with")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), metavar="N")
    options = parser.parse_args(arguments)
    manifest = load()
    try:
        before = parse(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        before = Releases()
    try:
        wanted = [str(version) for version in before.known] if options.offline else on_the_index()
    except FetchFailed as problem:
        print(f"releases: {problem}", file=sys.stderr)
        return 1
    with ProcessPoolExecutor(max_workers=max(options.jobs, 1)) as pool:
        tasks = [pool.submit(look_at, release, options.drop, options.offline) for release in wanted]
        looked = []
        for task in tasks:
            looked.append(one := task.result())
            print(_said(one), flush=True)
    problems = [one.problem for one in looked if one.problem]
    problems += [f"vLLM {one.release} took {one.seconds:.1f} s" for one in looked if one.seconds > MOST_S]
    problems += [
        f"vLLM {one.release}: {row.fix} refused in {row.function}: {row.reason}"
        for one in looked
        for row in one.rows
        if row.verdict is Verdict.REFUSED
    ]
    seen = [one for one in looked if one.rows]
    if any(one.problem and not one.rows for one in looked) or not seen:
        print("releases: nothing was written, for the table would lack releases", file=sys.stderr)
    else:
        after = table(manifest, seen)
        FILE.write_text(dump(after), encoding="utf-8")
        run = [options.python, EXECUTED.with_name("executed_forms.py")]
        if options.python and subprocess.run(run, check=False).returncode:
            problems.append("not every form was executed as it should be")
        PAGE.write_text(page(manifest, after), encoding="utf-8")
        slowest = max(seen, key=lambda one: one.seconds)
        print(f"{len(seen)} releases; the slowest, {slowest.release}, took {slowest.seconds:.2f} s")
        print("since the table that was there:")
        print(*(f"  {line}" for line in changes(before, after) or ["nothing changed"]), sep="\n")
    print(*(f"releases: {problem}" for problem in problems), sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _said(one: Looked) -> str:
    if not one.rows:
        return f"{one.release:12} {'yanked' if one.yanked else one.problem}"
    counts = collections.Counter(row.verdict for row in one.rows)
    said = (Verdict.APPLIES, Verdict.UPSTREAM, Verdict.ABSENT, Verdict.REFUSED)
    return f"{one.release:12} {one.seconds:.2f} s  " + "  ".join(f"{counts[v]:2} {v.value}" for v in said if counts[v])


if __name__ == "__main__":
    sys.exit(main())
