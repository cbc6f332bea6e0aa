"""`doctor` says why it is not working, whatever is not working, and neither waits nor tells secrets."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from looked_for import examined, found

from h2d_patch import __version__, settings
from h2d_patch.cli import main
from h2d_patch.operate import doctor
from h2d_patch.operate.doctor import environment, examination, installation, machine
from h2d_patch.operate.doctor.finding import OK, PROBLEM, WARNING, Finding
from h2d_patch.report import status

ROOT = Path(__file__).resolve().parents[2]
POINT = "[vllm.general_plugins]\nh2d_patch = h2d_patch.plugin:register\n"


# --- the whole ---


def test_it_needs_neither_torch_nor_vllm_and_imports_neither(run_dir: Path) -> None:
    script = (
        "import sys\n"
        "for name in {missing}: sys.modules[name] = None\n"
        "from h2d_patch.cli import main\n"
        "status = main(['doctor', '--json'])\n"
        "assert not [name for name in ('torch', 'triton', 'vllm') if sys.modules.get(name)]\n"
        "sys.exit(status)\n"
    )
    for missing in ((), ("torch", "triton", "vllm", "wrapt", "prometheus_client")):
        done = subprocess.run(
            [sys.executable, "-c", script.format(missing=missing)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "H2D_PATCH_STRICT": "yes"}, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        said = json.loads(done.stdout)
        assert said["exit_status"] == 2 and said["versions"]["h2d_patch"] == __version__
        assert any("H2D_PATCH is not set here" in one["found"] for one in said["findings"])
        without = bool(missing) or importlib.util.find_spec("vllm") is None
        assert any("no vLLM installed" in one["found"] for one in said["findings"]) is without


def test_the_exit_status_says_how_bad_it_is() -> None:
    ok, warning = Finding(OK, "x", "x"), Finding(WARNING, "x", "x", bad_input=True)
    assert doctor.exit_status([ok, warning]) == 0
    assert doctor.exit_status([ok, Finding(PROBLEM, "x", "x")]) == 1
    assert doctor.exit_status([Finding(PROBLEM, "x", "x"), Finding(PROBLEM, "x", "x", bad_input=True)]) == 2


def test_what_hangs_or_breaks_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    def hangs(*_: object) -> Iterator[Finding]:
        yield Finding(OK, "memory", "as far as it came")
        threading.Event().wait(100)

    def breaks(*_: object) -> Iterator[Finding]:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(machine, "memory", hangs)
    monkeypatch.setattr(machine, "compiler", breaks)
    monkeypatch.setattr(machine, "PROBE_S", 1.0)
    began = time.monotonic()
    findings = examination.examine(patience_s=3.0).findings
    assert time.monotonic() - began < 60
    found(findings, OK, "as far as it came")
    assert any(one.about == "memory" and "no answer within 3 s" in one.found for one in findings)
    assert found(findings, PROBLEM, "doctor itself failed here: ZeroDivisionError: of ours").about == "compiler"


def test_the_text_has_what_to_do_beside_what_was_found() -> None:
    text = doctor.as_text([Finding(OK, "a", "well", "nothing"), Finding(PROBLEM, "longer", "bad " * 50, "mend it")])
    lines = text.splitlines()
    assert lines[0] == "ok       a       well" and lines[1].startswith("PROBLEM  longer  bad bad")
    assert lines[-3].strip() == "→ mend it" and lines[-1] == "1 problem." and max(map(len, lines)) <= 118
    assert doctor.as_text([Finding(OK, "a", "well")]).endswith("Nothing is wrong.")


def test_a_ticket_has_no_secrets(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    secrets = {
        "VLLM_API_KEY": "s3cret-1",
        "HF_TOKEN": "s3cret-2",
        "H2D_PATCH_TOKEN": "s3cret-3",
        "MY_H2D_PATCH": "s3cret-4",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    process = tmp_path / "proc" / "4194300"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(b"/opt/vllm\0serve\0--api-key\0s3cret-5\0")
    (process / "environ").write_bytes(b"VLLM_API_KEY=s3cret-6\0")
    seen = list(status.serving(tmp_path / "proc"))
    monkeypatch.setattr(status, "serving", lambda proc: iter(seen))
    main(["doctor", "--json"])
    text = capsys.readouterr().out
    assert "s3cret" not in text
    said = json.loads(text)
    assert any("Process 4194300 (vllm serve): H2D_PATCH is not set" in one["found"] for one in said["findings"])
    assert said["environment"] == {"H2D_PATCH_RUN_DIR": str(run_dir), "H2D_PATCH_TOKEN": "(unknown)"}


# --- plugin ---


def distribution(
    place: Path, name: str = "h2d-patch", version: str = __version__, points: str = POINT, needs: str = ""
) -> Path:
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    (info / "entry_points.txt").write_text(points)
    return place


@pytest.mark.parametrize(
    ("places", "level", "says"),
    [
        ([], PROBLEM, "no distribution h2d-patch is installed"),
        ([{}], OK, "vLLM finds it by its entry point"),
        ([{}, {"version": "0.0.9"}], PROBLEM, "2 distributions h2d-patch are installed: .*0.0.9 in"),
        ([{"points": ""}], PROBLEM, "has no entry point 'h2d_patch'"),
        (
            [{"points": POINT.replace("register", "other")}],
            PROBLEM,
            "leads to h2d_patch.plugin:other; expected h2d_patch.plugin:register",
        ),
        ([{"version": "0.0.9"}], WARNING, f"is version {__version__}, its distribution says 0.0.9"),
        ([{"needs": "wrapt-of-another-name>=1"}], PROBLEM, "wrapt-of-another-name, which it needs, is not installed"),
        (
            [{"needs": "numpy>=99"}, {"name": "numpy", "version": "1.0", "points": ""}],
            PROBLEM,
            "numpy is 1.0; expected >=99",
        ),
        ([{"needs": "absent; extra == 'plot'"}], OK, "vLLM finds it"),
    ],
)
def test_whether_vllm_finds_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[dict[str, str]], level: str, says: str
) -> None:
    roots = [distribution(tmp_path / str(number), **about) for number, about in enumerate(places)]
    monkeypatch.setattr(sys, "path", [str(ROOT), *map(str, roots), *map(str, roots)])
    findings = list(installation.plugin({}))
    found(findings, level, says)
    if level == OK:
        assert len(findings) == 1


def test_what_ray_s_workers_do_not_get_is_said_where_there_is_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ray", "vllm/ray", "vllm/v1/engine"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/v1/__init__.py").touch()
    (tmp_path / "vllm/v1/engine/core.py").write_text("load_general_plugins()\n")
    copies = tmp_path / "vllm/ray/ray_env.py"
    copies.write_text("RAY_NON_CARRY_OVER_ENV_VARS = set()\n\ndef get_env_vars_to_copy():\n    pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environ = {"VLLM_CONFIG_ROOT": str(tmp_path)}
    assert [one.level for one in installation.under_ray(environ)] == [OK]
    (tmp_path / "ray_non_carry_over_env_vars.json").write_text('["H2D_PATCH"]')
    (said,) = installation.under_ray(environ)
    assert (said.level, said.do) == (WARNING, "take H2D_PATCH out of that file")
    copies.write_text("def another():\n    pass\n")
    assert "H2D_PATCH=1 ray start" in next(installation.under_ray(environ)).do
    (tmp_path / "ray/__init__.py").unlink()
    (tmp_path / "ray").rmdir()
    importlib.invalidate_caches()  # made and taken away within one step of the file system's clock
    assert not list(installation.under_ray(environ))


def test_two_copies_of_the_package_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h2d_patch").mkdir()
    (tmp_path / "h2d_patch/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path), str(distribution(tmp_path / "site"))])
    found(list(installation.plugin({})), WARNING, f"beside .* there is {tmp_path}/h2d_patch in sys.path")


# --- environment ---


@pytest.mark.parametrize(
    ("environ", "level", "says", "status"),
    [
        ({}, PROBLEM, "H2D_PATCH is not set here: nothing is patched", 1),
        ({"H2D_PATCH": "0"}, PROBLEM, "H2D_PATCH='0' here: nothing is patched", 1),
        ({"H2D_PATCH": "1"}, OK, "H2D_PATCH='1'", 0),
        ({"H2D_PATCH": "1", "VLLM_PLUGINS": "other"}, PROBLEM, "VLLM_PLUGINS='other' leaves h2d_patch out", 1),
        ({"H2D_PATCH": "1", "VLLM_PLUGINS": ""}, PROBLEM, "VLLM_PLUGINS='' leaves h2d_patch out", 1),
        ({"H2D_PATCH": "1", "VLLM_PLUGINS": "other,h2d_patch"}, OK, "H2D_PATCH='1'", 0),
        ({"H2D_PATCH": "kvswap"}, PROBLEM, "unknown fix 'kvswap'", 2),
        ({"H2D_PATCH": "-kv-swap"}, PROBLEM, "only leaves fixes out", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_PINNED_MB": "1G"}, PROBLEM, "H2D_PATCH_PINNED_MB='1G'", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_AB": "kv-swap:soon"}, PROBLEM, "H2D_PATCH_AB='kv-swap:soon'", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_AB": "kvswap:30s"}, PROBLEM, "H2D_PATCH_AB: unknown fix 'kvswap'", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_SERVER": "a/b"}, PROBLEM, "H2D_PATCH_SERVER='a/b'", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_MANIFEST": "/nowhere.toml"}, PROBLEM, "/nowhere.toml: No such file", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_PROFILE": "/nowhere.json"}, PROBLEM, "/nowhere.json: there is no such file", 2),
        ({"H2D_PATCH": "1", "H2D_PATCH_PROFILES": "x"}, WARNING, "H2D_PATCH_PROFILES is set, and nothing reads it", 0),
    ],
)
def test_what_the_environment_asks_for(
    run_dir: Path, environ: dict[str, str], level: str, says: str, status: int
) -> None:
    findings = [one for one in examined(**environ) if one.about in ("variables", "manifest", "profile")]
    assert found(findings, level, says).do or level == OK
    assert doctor.exit_status(findings) == status


def test_one_bad_variable_does_not_hide_another(run_dir: Path) -> None:
    findings = examined(
        H2D_PATCH="nonsense", H2D_PATCH_STRICT="yes", H2D_PATCH_PINNED_MB="-1", H2D_PATCH_MANIFEST="/none"
    )
    for says in ("unknown fix 'nonsense'", "H2D_PATCH_STRICT='yes'", "H2D_PATCH_PINNED_MB='-1'", "/none: No such file"):
        assert found(findings, PROBLEM, says).bad_input
    assert not [one for one in findings if one.level == OK and one.found.startswith("H2D_PATCH=")]


@pytest.mark.parametrize("value", ["mrope-position", "-kv-swap"])
def test_a_variable_that_cannot_be_used_is_not_also_well(value: str) -> None:
    asked, (said,) = environment.asked({"H2D_PATCH": value})
    assert said.level == PROBLEM and said.bad_input
    assert not list(environment.variables({"H2D_PATCH": value}, False, asked.unusable))
    asked, (said,) = environment.asked(also := {"H2D_PATCH": "1", "H2D_PATCH_AB": "kvswap:30s"})
    assert [one.found for one in environment.variables(also, False, asked.unusable)] == ["H2D_PATCH='1'"]


def test_every_variable_that_anything_reads_is_known() -> None:
    texts = [path.read_text() for path in (ROOT / "h2d_patch").rglob("*.py")]
    read = set(re.findall(r"""["'](H2D_PATCH(?:_[A-Z]+)*)["']""", "\n".join(texts)))
    assert read == set(settings.VARIABLES)
    assert environment.ours({"H2D_PATCH": "1", "PATH": "x"}) == {"H2D_PATCH": "1"}
