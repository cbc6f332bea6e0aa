"""What H2D_PATCH and its siblings may say, and what is said of the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from h2d_patch.settings import ConfigurationError, Selection, Settings, checked_run_dir

DEFAULTS = {"a": True, "b": True, "c": False}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", ""),
        ("0", ""),
        ("1", "ab"),
        ("all", "ab"),
        ("a", "a"),
        ("a, c", "ac"),
        ("all,-b", "a"),
        ("all,c", "abc"),
        ("1,-a,-b", ""),
    ],
)
def test_h2d_patch_selects_fixes(text: str, chosen: str) -> None:
    assert Selection.parse(text).fixes(DEFAULTS) == frozenset(chosen)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "unknown fix 'nonsense'; expected 0, 1, all, or fix ids of: a, b, c"),
        ("all,-nonsense", "unknown fix 'nonsense'"),
        ("-a", "only leaves fixes out"),
        ("a,-a", "both names and leaves out 'a'"),
        ("true", "unknown fix 'true'"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused_with_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Selection.parse(text).fixes(DEFAULTS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("H2D_PATCH_PINNED_MB", "-1"),
        ("H2D_PATCH_PINNED_MB", "0"),
        ("H2D_PATCH_PINNED_MB", "256M"),
        ("H2D_PATCH_PINNED_MB", "1e3"),
        ("H2D_PATCH_STRICT", "yes"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='{value}'; expected"):
        Settings.from_environ({name: value})


def test_defaults_hold_where_nothing_is_set() -> None:
    settings = Settings.from_environ({})
    assert not settings.selection and not settings.strict and settings.pinned_bytes == 256 << 20
    assert settings.run_dir.name == f"h2d_patch-{os.getuid()}"


def test_profiles_lie_in_the_cache_of_the_user_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.from_environ({}).profile_dir == Path("/home/someone/.cache/h2d-patch/profiles")
    cache = {"XDG_CACHE_HOME": "/cache", "H2D_PATCH_PROFILE": "/etc/profile.json"}
    assert Settings.from_environ(cache).profile_dir == Path("/cache/h2d-patch/profiles")
    assert Settings.from_environ(cache).profile == Path("/etc/profile.json")
    assert Settings.from_environ({"XDG_CACHE_HOME": "cache"}).profile_dir == Path(
        "/home/someone/.cache/h2d-patch/profiles"
    )
    assert Settings.from_environ({}).profile is None


def test_a_run_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    made = checked_run_dir(tmp_path / "a" / "b", create=True)
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        checked_run_dir(tmp_path / "link")


def test_a_run_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="can be written by others"):
        checked_run_dir(tmp_path / "open")


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="expected a directory"):
        checked_run_dir(tmp_path / "file", create=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ConfigurationError, match="belongs to user id 12345"):
        checked_run_dir(tmp_path / "theirs")


def test_a_home_is_found_where_no_shell_has_looked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    names = ("H2D_PATCH_MANIFEST", "H2D_PATCH_PROFILE", "H2D_PATCH_RUN_DIR")
    settings = Settings.from_environ({name: f"~/{name}" for name in names})
    found = [settings.manifest, settings.profile, settings.run_dir]
    assert found == [Path("/somewhere") / name for name in names]
    assert Settings.from_environ({"H2D_PATCH_PROFILE": "~nobody-here/x"}).profile == Path("~nobody-here/x")
