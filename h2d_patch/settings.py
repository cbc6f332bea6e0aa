"""Environment variables, read once into one frozen Settings."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .operate.slices import SETTLE_SHARE, Slices
from .owned import others_may_write

DEFAULT_PINNED_MB = 256
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}
_SERVER = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Every variable of ours that anything reads.
VARIABLES = (
    "H2D_PATCH",
    "H2D_PATCH_MANIFEST",
    "H2D_PATCH_STRICT",
    "H2D_PATCH_RUN_DIR",
    "H2D_PATCH_SERVER",
    "H2D_PATCH_AB",
    "H2D_PATCH_PINNED_MB",
    "H2D_PATCH_PROFILE",
    "H2D_PATCH_COMMIT",
)
_SWITCH_WORDS = {"": False, "0": False, "1": True}


class ConfigurationError(Exception):
    """A setting or a file that we cannot use; the text names it, says what was found and what was expected."""


@dataclass(frozen=True)
class Selection:
    """Which fixes `H2D_PATCH` asks for: every default one (`everything`), plus `added`, minus `removed`."""

    everything: bool
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.everything or bool(self.added)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read the value of `H2D_PATCH`: unset, `0`, `1`, `all`, or fix ids, with `-` before those to leave out."""
        words = [word.strip() for word in text.split(",") if word.strip()]
        if words in ([], ["0"]):
            return cls(everything=False)
        everything = False
        added: list[str] = []
        removed: list[str] = []
        for word in words:
            if word in ("1", "all"):
                everything = True
            elif word.startswith("-"):
                removed.append(word[1:].strip())
            else:
                added.append(word)
        if removed and not (everything or added):
            raise ConfigurationError(
                f"H2D_PATCH={text!r} only leaves fixes out; expected what to leave them out of, as in 'all,{words[0]}'"
            )
        if both := sorted(set(added) & set(removed)):
            raise ConfigurationError(f"H2D_PATCH={text!r} both names and leaves out {both[0]!r}; expected either")
        return cls(everything, tuple(added), tuple(removed))

    def fixes(self, defaults: Mapping[str, bool]) -> frozenset[str]:
        """The selected ids among `defaults` (id → whether `all` includes it).

        Raises ConfigurationError for an id that no manifest has.
        """
        for word in (*self.added, *self.removed):
            if word not in defaults:
                known = ", ".join(sorted(defaults))
                raise ConfigurationError(f"H2D_PATCH: unknown fix {word!r}; expected 0, 1, all, or fix ids of: {known}")
        chosen = {fix for fix, default in defaults.items() if default} if self.everything else set()
        return frozenset((chosen | set(self.added)) - set(self.removed))


@dataclass(frozen=True)
class Settings:
    """All that the environment says to us.

    `pinned_bytes` bounds the pinned staging region of each process and device. `run_dir` holds one state file for
    each process, `server` what the operator, or an earlier process of it, calls the server. `profile` is the device
    profile that was asked for, `profile_dir` where those of this user lie. `ab` are the slices of an A/B, counted from
    the epoch, so that they are the same in every process of every host.
    """

    selection: Selection
    manifest: Path | None = None
    strict: bool = False
    run_dir: Path = Path()
    server: str | None = None
    pinned_bytes: int = DEFAULT_PINNED_MB << 20
    profile: Path | None = None
    profile_dir: Path | None = None
    ab: Slices | None = None

    def check_ab(self, known: Collection[str], selected: Collection[str] | None = None) -> None:
        """Raises ConfigurationError for an A/B of a fix that no manifest has, or that is not `selected`."""
        if self.ab is None:
            return
        if self.ab.fix not in known:
            raise ConfigurationError(
                f"H2D_PATCH_AB: unknown fix {self.ab.fix!r}; expected one of: {', '.join(sorted(known))}"
            )
        if selected is not None and self.ab.fix not in selected:
            raise ConfigurationError(
                f"H2D_PATCH_AB: {self.ab.fix!r} is not selected; expected a fix that H2D_PATCH puts in"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Raises ConfigurationError that names the variable."""
        env = os.environ if environ is None else environ
        manifest = env.get("H2D_PATCH_MANIFEST", "").strip()
        profile = env.get("H2D_PATCH_PROFILE", "").strip()
        return cls(
            selection=Selection.parse(env.get("H2D_PATCH", "")),
            manifest=_path(manifest) if manifest else None,
            strict=is_strict(env),
            run_dir=run_dir(env),
            server=server_name(env),
            pinned_bytes=_megabytes(env, "H2D_PATCH_PINNED_MB", DEFAULT_PINNED_MB) << 20,
            profile=_path(profile) if profile else None,
            profile_dir=profile_dir(env),
            ab=_slices(env, "H2D_PATCH_AB"),
        )


def _path(text: str) -> Path:
    """`~` is this user's home: a container's or a unit's file of variables is read by no shell."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such home
        return Path(text)


def is_strict(environ: Mapping[str, str]) -> bool:
    """Whether a problem of ours may keep the server from starting (`H2D_PATCH_STRICT=1`)."""
    text = environ.get("H2D_PATCH_STRICT", "").strip()
    if text not in _SWITCH_WORDS:
        raise ConfigurationError(f"H2D_PATCH_STRICT={text!r}; expected 0 or 1")
    return _SWITCH_WORDS[text]


def server_name(environ: Mapping[str, str]) -> str | None:
    """What `H2D_PATCH_SERVER` calls the server that a process belongs to."""
    name = environ.get("H2D_PATCH_SERVER", "").strip()
    return checked_server(name, "H2D_PATCH_SERVER=") if name else None


def checked_server(name: str, what: str = "server ") -> str:
    """Raises ConfigurationError for a name that is not fit for a file's."""
    if not _SERVER.fullmatch(name):
        raise ConfigurationError(f"{what}{name!r}; expected letters, digits, '.', '_' or '-', 64 at most")
    return name


def run_dir(environ: Mapping[str, str]) -> Path:
    """Where processes write their state: `H2D_PATCH_RUN_DIR`, or this user's directory under the temporary one."""
    if chosen := environ.get("H2D_PATCH_RUN_DIR", "").strip():
        return _path(chosen)
    try:
        return Path(tempfile.gettempdir()) / f"h2d_patch-{os.getuid()}"
    except OSError as error:
        raise ConfigurationError(f"H2D_PATCH_RUN_DIR is not set, and {error}; expected a directory of ours") from None


def profile_dir(environ: Mapping[str, str]) -> Path | None:
    """Where `h2d-patch calibrate` stores what it measured, in this user's cache; None for a user without a home."""
    cache = Path(environ.get("XDG_CACHE_HOME", "").strip())
    try:
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "h2d-patch" / "profiles"
    except RuntimeError:
        return None


def checked_run_dir(path: Path, create: bool = False) -> Path:
    """`path`, after making sure that it is a directory which only this user can write.

    Raises ConfigurationError otherwise, and FileNotFoundError if it is not there and `create` is false.
    """
    if create:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"run directory {path}: {error.strerror}; expected a directory of ours") from None
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"run directory {path}: {error.strerror}; expected a directory of ours") from None
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise ConfigurationError(f"run directory {path} is {kind}; expected a directory of this user's")
    if why := others_may_write(status):
        raise ConfigurationError(f"run directory {path} {why}")
    return path


def _megabytes(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= 1 << 20:
        raise ConfigurationError(f"{name}={text!r}; expected a whole number of MiB, 1 to {1 << 20}")
    return int(text)


def _slices(env: Mapping[str, str], name: str) -> Slices | None:
    """`FIX:LENGTH`, or `FIX:LENGTH:SETTLE` with what is left out at the start of each slice."""
    text = env.get(name, "").strip()
    if not text:
        return None
    fix, *lengths = (part.strip() for part in text.split(":"))
    seconds = [duration(length) for length in lengths]
    if not fix or len(seconds) not in (1, 2) or None in seconds:
        raise ConfigurationError(
            f"{name}={text!r}; expected a fix id and the length of a slice, as in 'kv-swap:30s', and maybe what is "
            "left out at its start, as in 'kv-swap:30s:5s'"
        )
    slice_s, settle_s = seconds[0] or 0.0, seconds[-1] or 0.0
    try:
        return Slices(fix, slice_s, 0.0, None, settle_s if len(seconds) == 2 else slice_s * SETTLE_SHARE)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r}: {error}") from None


def duration(text: str) -> float | None:
    """Seconds of `30s`, `2m` or `1500ms`; None for anything else."""
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _UNITS_S[found[2]] if found else None
