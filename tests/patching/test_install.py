"""What is put in comes out again, and what is not ours is left alone."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import wrapt

from h2d_patch.patching.install import install_replacement
from h2d_patch.patching.locate import locate, when_loaded
from h2d_patch.patching.rewrite import Refused
from h2d_patch.patching.switch import Site, Switch

SOURCE = "def f(x):\n    return ('old', x)\n"


def replaced(module: types.ModuleType) -> tuple[Site, object]:
    located = locate(module, "f")
    assert located is not None
    site = Site()
    site.on = True
    return site, install_replacement(located, lambda x: ("new", x), site)


def test_names_bound_by_other_modules_are_re_bound_and_put_back(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    early = make_module("from release_module import f as g\ndef call(x):\n    return g(x)\n", name="early_module")
    original = module.f
    _, undo = replaced(module)
    late = make_module("from release_module import f\n", name="late_module")
    assert (module.f(1), early.call(1), late.f(1)) == (("new", 1),) * 3
    undo()  # type: ignore[operator]
    assert module.f is original and early.g is original and late.f is original


def test_a_replaced_function_still_looks_like_the_original(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    _, undo = replaced(module)
    assert module.f.__name__ == "f" and module.f.__module__ == "release_module"
    undo()  # type: ignore[operator]


def test_a_switched_off_replacement_runs_the_original(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    site, undo = replaced(module)
    site.on = False
    assert module.f(1) == ("old", 1)
    undo()  # type: ignore[operator]


def test_a_function_that_another_package_replaced_is_refused_and_named(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    other = make_module("def patched(x):\n    return 0\n", name="other_plugin")
    module.f = other.patched
    with pytest.raises(Refused, match=r"patched in .*other_plugin\.py:1"):
        locate(module, "f")


def test_wrapping_by_another_package_is_counted_and_can_be_named(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    module.f = wrapt.FunctionWrapper(module.f, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    located = locate(module, "f")
    assert located is not None and len(located.layers) == 1 and located.foreign(0) is located.found


def test_the_release_s_own_python_s_and_torch_s_wrappers_are_not_foreign(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        "import functools, contextlib\n"
        "def deco(g):\n    @functools.wraps(g)\n    def inner(*a):\n        return g(*a)\n    return inner\n"
        "class C:\n    @staticmethod\n    @functools.lru_cache\n    @contextlib.contextmanager\n    @deco\n    def f():\n        yield 1\n"
    )
    located = locate(module, "C.f")
    assert located is not None and len(located.layers) >= 4 and located.foreign(4) is None


def test_a_wrapper_is_foreign_where_the_release_s_decorator_added_none(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module("def register_op(g):\n    return g\n@register_op\ndef f(x):\n    return x\n")
    other = make_module(
        "import functools, release_module\n"
        "def wrap(g):\n    @functools.wraps(g)\n    def inner(*a):\n        return g(*a)\n    return inner\n"
        "release_module.f = wrap(release_module.f)\n",
        name="other_plugin",
    )
    located = locate(module, "f")
    assert located is not None and located.foreign(1) is module.f and other


def test_a_lazily_loaded_module_is_not_loaded_by_re_binding(make_module, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import importlib.util

    module = make_module(SOURCE)
    (tmp_path / "lazyboom.py").write_text("raise RuntimeError('loaded')\n")
    spec = importlib.util.spec_from_file_location("lazyboom", tmp_path / "lazyboom.py")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["lazyboom"] = lazy
    spec.loader.exec_module(lazy)
    try:
        original = module.f
        _, undo = replaced(module)
        undo()  # type: ignore[operator]
        assert module.f is original
    finally:
        del sys.modules["lazyboom"]


def test_code_that_someone_puts_in_after_us_survives_our_undo(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(SOURCE)
    _, undo = replaced(module)
    module.f = theirs = lambda x: "theirs"
    undo()  # type: ignore[operator]
    assert module.f is theirs


def test_a_module_not_loaded_yet_is_reported_once_it_is(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "arrives_later.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[types.ModuleType] = []
    assert when_loaded("arrives_later", seen.append) and not seen
    module = __import__("arrives_later")
    assert seen == [module]
    assert when_loaded("arrives_later", seen.append) and len(seen) == 2
    sys.modules.pop("arrives_later")


def test_a_half_imported_module_is_left_for_later(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "halfway.py").write_text(
        "from h2d_patch.patching.locate import when_loaded\nanswer = when_loaded('halfway', lambda module: 1 / 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert __import__("halfway").answer is False
    sys.modules.pop("halfway")


def test_a_switch_turns_all_sites_and_clears_caches_when_it_flips() -> None:
    switch, sites, cleared = Switch(), [Site(), Site()], []
    switch.add(sites[0], lambda: cleared.append(1))
    switch.add(sites[1])
    switch.turn(True)
    assert [site.on for site in sites] == [True, True] and not cleared
    switch.turn(False)
    assert [site.on for site in sites] == [False, False] and cleared == [1]
    switch.remove(sites[0])
    switch.turn(True)
    assert [site.on for site in sites] == [False, True]


def test_flipping_from_several_threads_leaves_all_sites_alike() -> None:
    switch, sites = Switch(), [Site() for _ in range(5)]
    for site in sites:
        switch.add(site)
    threads = [threading.Thread(target=lambda: [switch.turn(i % 2 == 0) for i in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({site.on for site in sites}) == 1


def test_two_wrappers_of_the_release_s_own_for_one_decorator_are_its_own(make_module) -> None:  # type: ignore[no-untyped-def]
    module = make_module(
        "import functools\n"
        "def api(g):\n    @functools.wraps(g)\n    def inner(*a):\n        return g(*a)\n"
        "    @functools.wraps(inner)\n    def dump(*a):\n        return inner(*a)\n    return dump\n"
        "@api\ndef f(x):\n    return x\n"
    )
    located = locate(module, "f")
    assert located is not None and len(located.layers) == 2 and located.foreign(1) is None


def test_more_of_python_s_wrappers_than_decorators_are_someone_else_s(make_module) -> None:  # type: ignore[no-untyped-def]
    import functools

    module = make_module("class C:\n    def f(self, x):\n        return x\n")
    module.C.f = functools.lru_cache(module.C.f)
    located = locate(module, "C.f")
    assert located is not None and located.foreign(0) is module.C.f
