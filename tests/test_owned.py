"""What tells a server what to do is read only from where nobody else can have written it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from h2d_patch import owned
from h2d_patch.copies.profile_file import Key as ProfileKey
from h2d_patch.copies.profile_file import Places, Unusable, find, load
from h2d_patch.manifest import ManifestError
from h2d_patch.manifest import load as load_manifest

MOST = 1000
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir(mode=0o755)
    path = tmp_path / "place" / "ours.toml"
    path.write_text("manifest = 1\n")
    path.chmod(0o644)
    return path


def give_away(path: Path) -> None:
    os.chown(path, 12345, 12345)


def exchange_for_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file that the group may write": (lambda path: path.chmod(0o664), r"can be written by others \(mode 0664\); expected 0644"),
    "a file that all may write": (lambda path: path.chmod(0o646), r"can be written by others \(mode 0646\)"),
    "a directory that the group may write": (lambda path: path.parent.chmod(0o775), r"is in .*/place, which can be written by others \(mode 0775\); expected 0755"),
    "a directory like /tmp": (lambda path: path.parent.chmod(0o1777), r"is in .*/place, which can be written by others \(mode 1777\)"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is not a regular file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    "a file without end": (lambda path: path.write_bytes(b"#" * (4 << 20) + b"\n"), "is larger than"),
}  # fmt: skip
THEIRS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file of someone else's": (give_away, "belongs to user id 12345; expected 0, the user who runs this"),
    "a directory of someone else's": (lambda path: give_away(path.parent), "is in .*/place, which belongs to user id 12345"),
}  # fmt: skip
CASES = [*FAULTS, *(pytest.param(name, marks=needs_root) for name in THEIRS)]


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("follow", [False, True])
def test_what_others_may_have_written_is_not_read(file: Path, what: str, root: bool, follow: bool) -> None:
    fault, says = {**FAULTS, **THEIRS}[what]
    assert owned.read(file, MOST, root, follow) == b"manifest = 1\n"
    fault(file)
    with pytest.raises(owned.NotOurs, match=says if root else re.sub("expected 0755", "expected 0700", says)):
        owned.read(file, MOST, root, follow)


@pytest.mark.parametrize("what", CASES)
def test_a_manifest_from_there_is_refused_with_the_reason(file: Path, what: str) -> None:
    fault, says = {**FAULTS, **THEIRS}[what]
    load_manifest(file)
    fault(file)
    with pytest.raises(ManifestError, match=f"{re.escape(str(file))}: .*{says}.*H2D_PATCH_MANIFEST"):
        load_manifest(file)


@pytest.mark.parametrize("what", CASES)
def test_a_profile_from_there_is_not_used_and_the_reason_is_kept(file: Path, what: str) -> None:
    fault, says = {**FAULTS, **THEIRS}[what]
    fault(file)
    with pytest.raises(Unusable, match=says):
        load(file)
    key = ProfileKey("a GPU", "PCIe 5 x16", "1", "13.0", "3.6.0", "0")
    found, _, (reason,) = find(key, Places(file), file.parent / "none")
    assert found is None and re.search(says, reason)


def test_a_link_is_refused_or_followed_to_what_counts(file: Path) -> None:
    exchange_for_a_link(file)
    with pytest.raises(owned.NotOurs, match="is a symbolic link"):
        owned.read(file, MOST)
    assert owned.read(file, MOST, follow=True) == b"manifest = 1\n"
    file.with_suffix(".real").chmod(0o666)
    with pytest.raises(owned.NotOurs, match="can be written by others"):
        owned.read(file, MOST, follow=True)


def test_what_is_not_there_is_not_found(file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        owned.read(file.with_name("none"), MOST)
    with pytest.raises(FileNotFoundError):
        owned.read(file.parent / "none" / "none", MOST, follow=True)


def test_on_a_read_only_mount_nobody_writes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Kubernetes mounts a ConfigMap, whose directory has the mode 0777."""
    file.parent.chmod(0o777)
    real = os.fstatvfs

    def read_only(descriptor: int) -> object:
        found = real(descriptor)
        return os.statvfs_result((*tuple(found)[:8], found.f_flag | os.ST_RDONLY, found.f_namemax))

    monkeypatch.setattr(os, "fstatvfs", read_only)
    assert owned.read(file, MOST, root=True, follow=True) == b"manifest = 1\n"


def test_what_root_has_written_counts_as_the_system_s(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    monkeypatch.setattr(owned, "ROOT", uid)
    assert owned.read(file, MOST, root=True) == b"manifest = 1\n"
    with pytest.raises(owned.NotOurs, match=f"is in .* belongs to user id {uid}; expected {uid + 1}"):
        owned.read(file, MOST)
