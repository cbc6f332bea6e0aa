"""The fixes of this process: from the manifest through locate, recognise, build, self-test and install to a verdict.

Everything that vLLM could see an exception from (`start`, the post-import hooks, the device start-up) catches its own
errors, says so once in the log, and leaves the original running; under `H2D_PATCH_STRICT=1` it raises instead.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import wrapt

from . import __version__, roles
from .manifest import Fix, Manifest, load
from .operate import control, ray_env
from .operate.alternation import Alternation
from .operate.ray_forms import make_absolute
from .operate.switches import Switches
from .patching.install import build_rewrite, install_replacement, original_code
from .patching.locate import Located, describe, locate, overriding, subclasses, when_loaded
from .patching.pattern import Definition
from .patching.recognise import Target, Verdict, function_hash, recognise
from .patching.rewrite import ModuleSource, Refused
from .patching.switch import Site, Switch, last_line
from .releases import shipped
from .report.check import Installed, parsed, without_source
from .report.state import SCHEMA, StateWriter, start_time
from .report.status import DOES_NOT_APPLY, NOT_SELECTED, SWITCHED_OFF
from .settings import ConfigurationError, Settings, checked_run_dir, is_strict, run_dir, server_name

logger = logging.getLogger("vllm.plugins.h2d_patch")

# Every executor brings the device up through this method, in every release from 0.8.0 on, before it profiles memory.
# Up to 0.11.0 it stood in a module that this one imports, for the V0 engine as well. A worker loads the plugins before,
# in `init_worker`: in 0.8, whose V1 engine core loads none, that is what brings them into its process.
STARTUP_MODULES = "vllm.v1.worker.worker_base", "vllm.worker.worker_base"
STARTUP_CLASS, STARTUP_METHOD = "WorkerWrapperBase", "init_device"


class StrictError(RuntimeError):
    """A problem of ours that `H2D_PATCH_STRICT=1` turns into a failure to start."""


class _NoSecondTry:
    """A finder that lets an import which failed under `H2D_PATCH_STRICT=1` fail again wherever it is tried again."""

    def __init__(self, name: str, error: StrictError) -> None:
        self._name = name
        self._text = str(error)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            raise StrictError(self._text)


class Patch:
    """One target of one fix in this process."""

    def __init__(self, fix: Fix, target: Target, verdict: Verdict, reason: str) -> None:
        self.fix = fix
        self.target = target
        self.verdict = verdict
        self.reason = reason
        self.site = Site()
        self.selftest_ms: float | None = None
        self.undo: Callable[[], None] | None = None
        self.holder: Any = None  # the class or module that the function was put into

    def state(self) -> dict[str, Any]:
        verdict, reason = self.verdict, self.reason
        if verdict is Verdict.ACTIVE and not self.site.on:
            verdict, reason = Verdict.OFF, SWITCHED_OFF
        elif verdict is Verdict.ACTIVE and (by := overriding(self.holder, self.target.qualname.rpartition(".")[2])):
            reason = "; ".join(filter(None, (reason, f"not in {', '.join(by)}, which overrides it")))
        return {
            "fix": self.fix.id,
            "function": self.target.function,
            "verdict": verdict.value,
            "reason": reason,
            "calls": self.site.calls,
            "fallbacks": self.site.fallbacks,
            "fallback_reasons": dict(self.site.reasons),
            "bytes": self.site.bytes,
            "paths": dict(self.site.paths),
            "arms": {"on": self.site.arms[True].state(), "off": self.site.arms[False].state()},
            "selftest_ms": None if self.selftest_ms is None else round(self.selftest_ms, 2),
        }


class Process:
    """All patches of this process, and what is known of it."""

    def __init__(self, settings: Settings, manifest: Manifest, selected: frozenset[str]) -> None:
        self.settings = settings
        self.server = settings.server or own_server()
        self.release = _vllm_release()
        self.patches = [
            Patch(fix, target, Verdict.PENDING, "its module is not loaded")
            if fix.id in selected
            else Patch(fix, target, Verdict.OFF, NOT_SELECTED)
            for fix, target in manifest.targets()
        ]
        self.switches = {fix: Switch() for fix in selected}
        self.switched = Switches(settings.run_dir, self.server, self.switches)
        self.alternation = Alternation(self.switches, self._sites, self.switched.wanted, settings.ab)
        self._kept_off: dict[str, str] = {}  # fix id → why it stays off in this process
        self._failed: dict[str, str] = {}  # fix id → the error of ours that turned it off
        self._gpu_failures: dict[Target, str] = {}
        # To be asked again: half imported when we asked.
        self._retry: list[tuple[str, Callable[[types.ModuleType], None]]] = []
        self.undone = False
        self.ray = ray_env.Carrier()
        self.renew()
        self.writer = StateWriter(settings.run_dir, self.state, self.poll)

    def renew(self) -> None:
        """What a forked child must not inherit: role, device, counts, and locks that another thread may have held."""
        self.lock = threading.RLock()
        self.ray.renew()
        for switch in self.switches.values():
            switch.renew()
        self.switched.renew()
        self.alternation.renew()
        self.started = time.time()
        self.is_worker = False
        self.rank: int | None = None
        self.data_parallel_rank: int | None = None
        self.device: dict[str, Any] = {}
        self._worker: Any = None
        for patch in self.patches:
            patch.site.renew()
        # Another thread of the parent's may have been about to patch these; it is not in the child.
        loaded = dict.fromkeys(patch.target.module for patch in self.patches if patch.verdict is Verdict.PENDING)
        startup = [(name, callback) for name, callback in self._retry if name in STARTUP_MODULES + ray_env.MODULES]
        self._retry = startup + [(name, self.module_loaded) for name in loaded if name in sys.modules]

    def state(self) -> dict[str, Any]:
        return {
            **_identity(self.started, self.server),
            "role": roles.WORKER if self.is_worker else roles.role(),
            "rank": self.rank,
            "data_parallel_rank": self.data_parallel_rank,
            "vllm": self.release,
            "device": self.device,
            "switches": dict(self.switched.wanted),
            "control": self.switched.problem,
            "ab": self.alternation.state(),
            "targets": [patch.state() for patch in list(self.patches)],
        }

    def poll(self) -> bool:
        """Takes what the control file says; whether that changed anything. Called twice a second."""
        changed = self.switched.poll(self.rank)
        return self.alternation.follow(self.switched.control) or changed

    def _sites(self, fix: str) -> list[tuple[str, Site]]:
        """The functions that `fix` is in, with the place of each."""
        return [
            (patch.target.function, patch.site)
            for patch in self.patches
            if patch.fix.id == fix and patch.verdict is Verdict.ACTIVE
        ]

    # -- modules ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Registers for every module that has a target and is there, and for the device start-up."""
        installed = Installed()
        for patch in self.patches:
            module = patch.target.module
            if patch.verdict is not Verdict.PENDING or module in sys.modules:
                continue
            try:
                found = installed.module(module)
            except Refused:  # it may never be loaded; if it is, that is said then
                continue
            if found is None:
                self._absent(patch, f"there is no module {module} here")
        for name in dict.fromkeys(patch.target.module for patch in self.patches if patch.verdict is Verdict.PENDING):
            self._when_loaded(name, self.module_loaded)
        for name in STARTUP_MODULES:
            self._when_loaded(name, self._hook_startup)
        if self.switches:
            for name in ray_env.MODULES:
                self._when_loaded(name, self._carry_to_ray)

    def _when_loaded(self, name: str, callback: Callable[[types.ModuleType], None]) -> None:
        if not when_loaded(name, callback):
            self._retry.append((name, callback))

    def module_loaded(self, module: types.ModuleType) -> None:
        """The post-import hook of a module with targets."""
        try:
            with _nothing_escapes(f"patching {module.__name__}"), self.lock, _gc_paused():
                self._patch_module(module)
                self._ask_again()
        except StrictError as error:
            sys.meta_path.insert(0, _NoSecondTry(module.__name__, error))
            raise

    def _ask_again(self) -> None:
        again, self._retry = self._retry, []
        for name, callback in again:
            self._when_loaded(name, callback)

    def _patch_module(self, module: types.ModuleType) -> None:
        source: ModuleSource | None = None
        compiled = without_source(getattr(module, "__file__", None) or "")
        for patch in self.patches:
            if patch.target.module != module.__name__ or patch.verdict is not Verdict.PENDING:
                continue
            try:
                if compiled:
                    raise Refused(compiled)
                located = locate(module, patch.target.qualname)
                if located is None:
                    self._absent(patch, f"this release has no {patch.target.qualname} in {module.__name__}")
                    continue
                source = source or _source_of(module)
                self._patch(patch, source, located)
            except Refused as refusal:
                self._decide(patch, Verdict.REFUSED, str(refusal))
            except StrictError:
                raise
            except Exception as error:
                self._decide(patch, Verdict.FAILED, f"an error of ours: {last_line(error)}")

    def _patch(self, patch: Patch, source: ModuleSource, located: Located) -> None:
        target = patch.target
        definition = source.definition_of(target.qualname, original_code(located.function))
        recognition = recognise(target, source, definition, parsed(self.release))
        reason = self._beside_release(patch, function_hash(source, target.qualname), recognition.reason)
        if recognition.verdict is not Verdict.APPLIES:
            self._decide(patch, recognition.verdict, reason)
            return
        foreign = located.foreign(len(definition.decorator_list))
        if foreign is not None:
            raise Refused(f"another package has wrapped it: {describe(foreign)}")
        if keep_off := self._kept_off.get(patch.fix.id):
            self._decide(patch, Verdict.OFF, keep_off)
            return
        if failure := self._failed.get(patch.fix.id):
            patch.verdict, patch.reason = Verdict.FAILED, failure  # said when it happened; no failure to start, either
            return
        if why := self._never_runs(target):
            self._decide(patch, Verdict.ABSENT, why)
            return
        patch.site = Site(lambda _, reason: self.fail(patch, reason))
        install = self._build(patch, source, definition, located)
        failure = self._gpu_failures.get(target) or self._selftest(patch, located)
        if failure:
            self._decide(patch, Verdict.FAILED, f"self-test: {failure}")
            return
        patch.undo = install()
        self.switches[patch.fix.id].add(patch.site, located.clear_cache)
        patch.holder = located.holder
        self._decide(patch, Verdict.ACTIVE, reason)

    def _absent(self, patch: Patch, reason: str) -> None:
        self._decide(patch, Verdict.ABSENT, self._beside_release(patch, None, reason))

    def _beside_release(self, patch: Patch, source: str | None, reason: str) -> str:
        """`reason`, behind what sets the function with that source hash apart from the release's own."""
        difference = shipped().difference(patch.target.function, source, parsed(self.release))
        return "; ".join(filter(None, (difference, reason)))

    def _build(
        self, patch: Patch, source: ModuleSource, definition: Definition, located: Located
    ) -> Callable[[], Callable[[], None]]:
        import torch

        from .copies import EXPORTS

        Site.compiling = staticmethod(torch.compiler.is_compiling)
        site = patch.site
        replace = patch.target.replace
        if replace is not None:
            put = EXPORTS[replace.put].bind(site)
            return lambda: install_replacement(located, put, site)
        for name in {called for rewrite in patch.target.rewrites for called in rewrite.put.called()}:
            site.bind(name, EXPORTS[name].bind(site))
        return build_rewrite(located.function, source, definition, patch.target.rewrites, site)

    def _selftest(self, patch: Patch, located: Located) -> str | None:
        import torch

        from .copies import EXPORTS
        from .selftest.compare import SelfTestFailed, run

        try:
            original = located.found if patch.target.replace else None
            patch.selftest_ms = run(patch.target, EXPORTS, torch.device("cpu"), original)
        except SelfTestFailed as failure:
            return str(failure)
        return None

    def _decide(self, patch: Patch, verdict: Verdict, reason: str) -> None:
        patch.verdict, patch.reason = verdict, reason
        bad = verdict in (Verdict.REFUSED, Verdict.FAILED)
        level = logging.WARNING if bad else logging.INFO if verdict in (Verdict.ACTIVE, Verdict.OFF) else logging.DEBUG
        text = f"h2d_patch: {patch.fix.id} {verdict.value} in {patch.target.qualname}{': ' if reason else ''}{reason}"
        logger.log(level, "%s", text)
        if bad and self.settings.strict:
            raise StrictError(text)

    def _carry_to_ray(self, module: types.ModuleType) -> None:
        with _nothing_escapes("carrying our variables to Ray's workers"):
            if not self.undone:
                self.ray.module_loaded(module)

    # -- device start-up ----------------------------------------------------------------------------------------------

    def _hook_startup(self, module: types.ModuleType) -> None:
        with _nothing_escapes("hooking the device start-up"):
            if self.undone:
                return
            holder = getattr(module, STARTUP_CLASS, None)
            if holder is None and STARTUP_MODULES[1] in sys.modules:
                return  # an old release: it stands in the other module, and is hooked there
            for kind in _startup_classes(holder):
                if getattr(original := vars(kind)[STARTUP_METHOD], "_self_wrapper", None) is not _startup:
                    setattr(kind, STARTUP_METHOD, wrapt.FunctionWrapper(original, _startup))

    def device_started(self, wrapper: Any) -> None:
        """The one moment in a worker when a device may be used: after `init_device`, before memory is profiled."""
        with _nothing_escapes("device start-up"), self.lock:
            self._ask_again()
            worker = wrapper.worker
            if worker is self._worker:  # one of the wrapped methods has called another
                return
            self.is_worker = True
            self.rank = getattr(worker, "rank", getattr(wrapper, "rpc_rank", None))
            self.data_parallel_rank = _data_parallel_rank(worker)
            self._worker = worker
            self.switched.apply(self.rank)
            device = getattr(worker, "device", None)
            kind = getattr(device, "type", str(device))
            self.device = {"name": str(device)}
            on_gpu = kind == "cuda"
            if on_gpu and (why := _unguarded(worker)):
                self._keep_off(why)
            for patch in self.patches:
                if patch.verdict in (Verdict.PENDING, Verdict.ACTIVE) and (why := self._never_runs(patch.target)):
                    self._take_out(patch, Verdict.ABSENT, why)
            if on_gpu and any(patch.verdict in (Verdict.PENDING, Verdict.ACTIVE) for patch in self.patches):
                self._start_gpu(device, worker)
        self.writer.write()

    def _start_gpu(self, device: Any, worker: Any) -> None:
        from . import copies
        from .selftest.compare import SelfTestFailed, run

        # Without a connector no block is ever swapped, and nothing need be known of how fast they are.
        swaps = getattr(getattr(worker, "vllm_config", None), "kv_transfer_config", True) is not None
        places = copies.Places(self.settings.profile, self.settings.profile_dir) if swaps else None
        report = copies.start(device, self.settings.pinned_bytes, places)
        self.device.update(staging_bytes=report.ring_bytes, notes=list(report.reasons), profile=report.profile)
        for reason in report.reasons:
            logger.warning("h2d_patch: %s", reason)
        start = time.perf_counter()
        for patch in self.patches:
            if patch.verdict not in (Verdict.PENDING, Verdict.ACTIVE):
                continue
            try:
                run(patch.target, copies.EXPORTS, device, rounds=1)
            except Exception as error:  # memory that ran out in one test leaves the others to be made
                failure = str(error) if isinstance(error, SelfTestFailed) else last_line(error)
                self._gpu_failures[patch.target] = failure
                if patch.verdict is Verdict.ACTIVE:
                    self._take_out(patch, Verdict.FAILED, f"self-test on {device}: {failure}")
        self.device["selftest_s"] = round(time.perf_counter() - start, 3)

    def _keep_off(self, why: str) -> None:
        for patch in self.patches:
            if patch.fix.removes_wait:
                self._kept_off[patch.fix.id] = why
                if patch.verdict in (Verdict.PENDING, Verdict.ACTIVE):
                    self._take_out(patch, Verdict.OFF, why)

    def _never_runs(self, target: Target) -> str | None:
        """Why the worker of this process never calls `target`'s function, where that is known."""
        if target.owner is None or self._worker is None:
            return None
        owner = getattr(self._worker, target.owner, None)
        if owner is None:
            return None
        class_name, _, method = target.qualname.rpartition(".")
        for base in type(owner).__mro__:
            if method in vars(base):
                if (base.__module__, base.__qualname__) == (target.module, class_name):
                    return None
                break
        kind = type(owner)
        version = " (Model Runner V2)" if getattr(self._worker, "use_v2_model_runner", False) else ""
        return (
            f"{DOES_NOT_APPLY}: this worker runs {kind.__module__}.{kind.__qualname__}{version}, which never calls it"
        )

    # -- taking out ---------------------------------------------------------------------------------------------------

    def fail(self, patch: Patch, reason: str) -> None:
        """A copy function raised during a call; the original ran in its place. The whole fix is off from here on."""
        with self.lock:
            if patch.fix.id in self._failed:  # another thread's call, at the same time
                return
            self._failed[patch.fix.id] = f"off with {patch.target.qualname}: {reason}"
            for other in self.patches:
                if other.fix.id == patch.fix.id and other.verdict is Verdict.ACTIVE:
                    self.switches[other.fix.id].remove(other.site)
                    other.verdict = Verdict.FAILED
                    other.reason = reason if other is patch else self._failed[patch.fix.id]
        logger.warning("h2d_patch: %s is off in this process: %s", patch.fix.id, reason)

    def _take_out(self, patch: Patch, verdict: Verdict, reason: str) -> None:
        if patch.undo is not None:
            self.switches[patch.fix.id].remove(patch.site)
            patch.undo()
            patch.undo = None
        self._decide(patch, verdict, reason)

    def undo(self) -> None:
        """Takes every fix out: each function, attribute and re-bound name is the identical object that it was."""
        with self.lock:
            self.undone = True
            self.ray.undo()
            for patch in reversed(self.patches):
                if patch.verdict is Verdict.PENDING or patch.undo is not None:
                    self._take_out(patch, Verdict.OFF, "undone")
            for module in map(sys.modules.get, STARTUP_MODULES):
                holder = getattr(module, STARTUP_CLASS, None)
                for kind in _startup_classes(holder) if holder is not None else ():
                    if getattr(found := vars(kind)[STARTUP_METHOD], "_self_wrapper", None) is _startup:
                        setattr(kind, STARTUP_METHOD, found.__wrapped__)


current: Process | None = None
_start_lock = threading.Lock()
_gc_is_paused = False
_refused = False


def start() -> None:
    """Reads settings and manifest and watches for the modules; does nothing where that has been done already."""
    global current, _refused
    with _start_lock:
        if current is not None or _refused:
            return
        try:
            settings = Settings.from_environ()
            manifest = load(settings.manifest)
            selected = settings.selection.fixes(manifest.defaults)
            settings.check_ab(manifest.defaults, selected)
            if settings.strict:
                checked_run_dir(settings.run_dir, create=True)
            if settings.server is not None:
                control.remove_left_behind(settings.run_dir, settings.server)
            current = Process(settings, manifest, selected)
            os.environ["H2D_PATCH_SERVER"] = current.server  # children, forked or spawned, are of this server
        except Exception as error:
            _refuse_to_start(error)
            _refused = True  # said once; with strict, every time
            return
        chosen = ", ".join(sorted(selected)) or "no fix selected"
        unknown = shipped().about(current.release)
        logger.info("h2d_patch %s: %s (h2d-patch status)%s", __version__, chosen, unknown and f"; {unknown}")
    with _nothing_escapes("reading the control file"):
        current.poll()
    with _nothing_escapes("start-up"):
        make_absolute(os.environ)
        current.watch()
        current.writer.start()
        atexit.register(lambda: current.writer.write() if current is not None else None)


def _refuse_to_start(error: Exception) -> None:
    text = f"h2d_patch: nothing is patched: {error if isinstance(error, ConfigurationError) else last_line(error)}"
    logger.error("%s", text)
    try:
        strict = is_strict(os.environ)
    except ConfigurationError:
        strict = False
    if strict:
        raise StrictError(text) from None
    try:
        server = os.environ["H2D_PATCH_SERVER"] = server_name(os.environ) or own_server()
    except ConfigurationError:  # children find the name as wrong as this process does
        server = own_server()
    state = {
        **_identity(time.time(), server),
        "role": roles.role(),
        "rank": None,
        "vllm": _vllm_release(),
        "switches": {},
        "targets": [],
    }
    with contextlib.suppress(ConfigurationError):  # no directory to write to: the log has said what is wrong
        StateWriter(run_dir(os.environ), lambda: {**state, "error": text}).write()


def _startup_classes(holder: Any) -> list[Any]:
    """The class that brings a device up, and those whose own form of the method runs in its place.

    Ray gives the class of an actor a copy of each method, in front of what is put into the base class.
    """
    return [holder, *(kind for kind in subclasses(holder) if STARTUP_METHOD in vars(kind))]


def _startup(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`init_device` with our device start-up behind it."""
    result = wrapped(*args, **kwargs)
    if current is not None:
        current.device_started(instance)
    return result


def _after_fork() -> None:
    global _start_lock, _gc_is_paused
    _start_lock = threading.Lock()
    if _gc_is_paused:  # by a thread that is not in the child
        _gc_is_paused = False
        gc.enable()
    if current is not None:
        current.renew()
        current.writer = StateWriter(current.settings.run_dir, current.state, current.poll)
        current.writer.start(delay_s=1.0)


os.register_at_fork(after_in_child=_after_fork)


def _data_parallel_rank(worker: Any) -> int | None:
    """Which of the engines that share a server's requests this worker is of: all have workers of the same ranks.

    From 0.14.0 on the index has it: a model without experts is served by engines that each think they are alone.
    """
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    found = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", None))
    return found if type(found) is int else None


_WITHOUT_EVENT = "without asynchronous scheduling: the wait that this removes orders buffers of the step there"


def _unguarded(worker: Any) -> str | None:
    """Why nothing orders the reuse of a step's other buffers in this worker but the waits that the H2D fixes remove.

    Where vLLM has an event for that (asynchronous scheduling), outputs stayed right with the fixes and 30 ms of work
    queued ahead of each step; where it has none, they did not, nor without the fixes (bench/order_elsewhere.py).
    """
    if getattr(getattr(worker, "model_runner", None), "prepare_inputs_event", None) is not None:
        return None
    config = getattr(worker, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return f"off under pipeline parallelism {_WITHOUT_EVENT}"
    if getattr(getattr(config, "model_config", None), "runner_type", None) == "pooling":
        return f"off for pooling models {_WITHOUT_EVENT}"
    return None


@contextmanager
def _nothing_escapes(doing: str) -> Iterator[None]:
    try:
        yield
    except StrictError:
        raise
    except Exception as error:
        logger.exception("h2d_patch: %s failed; the originals run", doing)
        if current is not None and current.settings.strict:
            raise StrictError(f"h2d_patch: {doing} failed: {last_line(error)}") from error


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Parsing makes hundreds of thousands of objects: collections took 350 ms of an API server's start."""
    global _gc_is_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _gc_is_paused = True
    try:
        yield
    finally:
        _gc_is_paused = False
        gc.enable()


def _source_of(module: types.ModuleType) -> ModuleSource:
    path = module.__file__ or ""
    try:
        with open(path, "rb") as file:
            return ModuleSource(file.read(), path)
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused(f"{path or module.__name__} cannot be read as source: {error}") from None


def _vllm_release() -> str | None:
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    return version if isinstance(version, str) else None


def own_server() -> str:
    """The name of a server whose first process this is, where the operator has given none: unlike any other's."""
    pid = os.getpid()
    number = f"-{pid}-{start_time(pid) or 0}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[: 64 - len(number)] + number


def _identity(started: float, server: str) -> dict[str, Any]:
    pid = os.getpid()
    return {
        "schema": SCHEMA,
        "h2d_patch": __version__,
        "pid": pid,
        "start_time": start_time(pid),
        "host": socket.gethostname(),
        "server": server,
        "started": started,
    }
