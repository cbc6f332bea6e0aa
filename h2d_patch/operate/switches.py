"""The switches of one process, as the control file of its server has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from ..patching.switch import Switch
from ..settings import ConfigurationError
from . import control

logger = logging.getLogger("vllm.plugins.h2d_patch")


class Switches:
    """Turns the fixes of this process on and off as the control file says, whenever that has changed.

    `wanted` is what each fix was last told to be. A file that cannot be used leaves everything as it is and is said
    once in the log; `problem` says why until it can be used.
    """

    def __init__(self, directory: Path, server: str, switches: Mapping[str, Switch]) -> None:
        self._directory = directory
        self._server = server
        self._switches = switches
        self.wanted = {fix: switch.on for fix, switch in switches.items()}
        self.problem: str | None = None
        self.control: control.Control | None = None
        self.renew()

    def renew(self) -> None:
        """In a forked child: a lock that no thread of the parent's holds, and the file read anew."""
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None

    def poll(self, rank: int | None) -> bool:
        """Takes what the file says; whether anything has changed.

        Costs two `lstat` calls where the file has not. What cannot be used is looked at each time: it may be the
        directory that is mended, or the process that has a file descriptor to spare again.
        """
        seen = control.signature(self._directory, self._server)
        if seen == self._seen and self.problem is None:
            return False
        with self._lock:
            self._seen = seen if control.is_settled(seen) else None
            try:
                self.control = control.read(self._directory, self._server) or self.control
            except ConfigurationError as error:
                if str(error) == self.problem:
                    return False
                self.problem = str(error)
                logger.warning("h2d_patch: the switches stay as they are: %s", error)
                return True
            mended, self.problem = self.problem is not None, None
        return self.apply(rank) or mended

    def apply(self, rank: int | None) -> bool:
        """Turns what a process of that rank is to have otherwise than it has. What nobody has switched stays."""
        turned = False
        with self._lock:
            for fix, switch in self._switches.items():
                on = None if self.control is None else self.control.wanted(fix, rank)
                if on is None or on == self.wanted[fix]:
                    continue
                self.wanted[fix] = on
                switch.turn(on)
                logger.info("h2d_patch: %s is switched %s in this process", fix, "on" if on else "off")
                turned = True
        return turned
