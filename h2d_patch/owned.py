"""Files and directories that nobody else can have written: the one check for all that tells a server what to do."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

ROOT = 0
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY)  # a directory that may be searched, but not listed, will do


class NotOurs(Exception):
    """Someone else may have written it, or it is no such file; the text says what was found and what was expected."""


def others_may_write(status: os.stat_result, root: bool = False) -> str | None:
    """Why someone else may have written what has this status; None where only this user can, or (`root`) the system's.

    Of a directory, the sticky bit is not enough: a name that is not there yet is anyone's to take.
    """
    us = os.getuid()
    if status.st_uid != us and not (root and status.st_uid == ROOT):
        whom = f"{us}, the user who runs this" + (", or root" if root and us != ROOT else "")
        return f"belongs to user id {status.st_uid}; expected {whom}"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        least = "0700" if stat.S_ISDIR(status.st_mode) and not root else f"{mode & ~0o022:04o}"
        return f"can be written by others (mode {mode:04o}); expected {least}"
    return None


def read(path: Path, most: int, root: bool = False, follow: bool = False) -> bytes:
    """What is in a regular file of this user's (`root`: or root's) in a directory of theirs.

    The directory is opened first, and the file in it: nobody can exchange one of them in between. `follow`: links are
    followed, and the place they lead to is what counts; otherwise a link is refused. On a read-only mount nobody
    writes, and who mounted it vouches for it. Never waits for a pipe. Raises NotOurs, also for more than `most` bytes,
    and OSError.
    """
    if follow:
        path = Path(os.path.realpath(path))
    directory = os.open(path.parent, _SEARCH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if why := _fault(file, directory, path, root):
                raise NotOurs(why)
            content = _content(file, most + 1)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs("is a symbolic link; expected a file of this user's") from None
        raise
    finally:
        os.close(directory)
    if len(content) > most:
        raise NotOurs(f"is larger than {most} bytes")
    return content


def _fault(file: int, directory: int, path: Path, root: bool) -> str | None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if os.fstatvfs(file).f_flag & os.ST_RDONLY:
        return None
    if why := others_may_write(os.fstat(directory), root):
        return f"is in {path.parent}, which {why}"
    return others_may_write(status, root)


def _content(file: int, most: int) -> bytes:
    parts = []
    while most > 0 and (part := os.read(file, most)):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)
