"""The copies of real releases: their own functions rewritten and run on the CPU, with all around them pretended."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h2d_patch.copies import EXPORTS, forced_staging
from h2d_patch.manifest import load
from h2d_patch.patching.install import build_rewrite
from h2d_patch.patching.recognise import Verdict, recognise
from h2d_patch.patching.rewrite import ModuleSource, _imports
from h2d_patch.patching.switch import Site

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch

pytestmark = pytest.mark.releases

MODELS = "vllm.model_executor.models."
INPUTS, UTILS, RUNNER = "vllm.multimodal.inputs", "vllm.multimodal.utils", "vllm.v1.worker.gpu_model_runner"
QWEN2, QWEN2_5, QWEN3 = MODELS + "qwen2_vl", MODELS + "qwen2_5_vl", MODELS + "qwen3_vl"
GIVEN = {
    "torch": torch,
    "np": np,
    "F": torch.nn.functional,
    "nn": torch.nn,
    "lru_cache": functools.lru_cache,
    "groupby": itertools.groupby,
    "is_pin_memory_available": lambda: False,
    "logger": SimpleNamespace(debug=lambda *args: None, warning_once=lambda *args: None),
    **{name: getattr(typing, name) for name in ("Any", "Optional", "Union", "cast")},
}


class Annotation:
    """What stands in an annotation."""

    def __class_getitem__(cls, item):
        return cls


def part_of(release, name, *wanted, **names):
    """A module with only the functions `wanted` of a release's module, all else in it pretended by `names`."""
    path = fetch(release) / (name.replace(".", "/") + ".py")
    tree = ast.parse(path.read_bytes(), str(path))
    imports = [node for node in _imports(tree) if getattr(node, "module", "") != "__future__"]
    body, annotations = [], set()
    for node in tree.body:
        methods = {part.partition(".")[2] for part in wanted if part.partition(".")[0] == getattr(node, "name", "")}
        if isinstance(node, ast.ClassDef) and methods:
            node.body = [part for part in node.body if getattr(part, "name", None) in methods]
            node.bases = [base for base in node.bases if ast.unparse(base) == "nn.Module" and "__init__" in methods]
            node.decorator_list = []
            assert {part.name for part in node.body} == methods, (node.name, methods)
        elif not methods:
            continue
        body.append(node)
        for part in ast.walk(node):
            parts = [getattr(part, field, None) for field in ("annotation", "returns")]
            for inner in (inner for found in parts if found is not None for inner in ast.walk(found)):
                annotations |= {inner.id} if isinstance(inner, ast.Name) else set()
    # Never run, but functions compile differently where a name is imported in the module.
    unused = ast.If(ast.Constant(False), imports, [])
    tree.body = [ast.copy_location(unused, tree.body[0]), *body]
    module = types.ModuleType(name)
    module.__file__ = str(path)
    vars(module).update({one: Annotation for one in annotations if not hasattr(builtins, one)} | GIVEN | names)
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True), vars(module))
    return module


def function_in(module, qualname):
    holder = module
    for part in qualname.split(".")[:-1]:
        holder = getattr(holder, part)
    found = vars(holder)[qualname.rpartition(".")[2]]
    for attribute in ("__func__", "__wrapped__"):
        found = getattr(found, attribute, found)
    return found


@contextlib.contextmanager
def rewritten(module, *qualnames):
    """One site for each function, with every target in it that applies."""
    source = ModuleSource(Path(module.__file__).read_bytes(), module.__file__)
    sites, undos = [], []
    for qualname in qualnames:
        function, site = function_in(module, qualname), Site()
        definition = source.definition_of(qualname, function.__code__)
        targets = [t for _, t in load().targets() if t.function == f"{module.__name__}:{qualname}" and t.rewrites]
        rewrites = [
            rewrite
            for target in targets
            if recognise(target, source, definition, None).verdict is Verdict.APPLIES
            for rewrite in target.rewrites
        ]
        assert rewrites, qualname
        for put in {put for rewrite in rewrites for put in rewrite.put.called()}:
            site.bind(put, EXPORTS[put].bind(site))
        undos.append(build_rewrite(function, source, definition, rewrites, site)())
        sites.append(site)
    yield sites
    for undo in undos:
        undo()


def off_and_on(sites, run):
    """What `run` gives with the fixes off, and on; the ring is overwritten behind it."""
    found = []
    for on in (False, True):
        for site in sites:
            site.on = on
        with forced_staging(1 << 18) as ring:
            found.append(run())
            ring.memory.fill_(0x5A)
    assert not any(site.fallbacks for site in sites), [site.reasons for site in sites]
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def leaves(tree):
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for value in values for leaf in leaves(value)]


def json_map_leaves(function, value):
    if isinstance(value, dict):
        return {key: json_map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(json_map_leaves(function, item) for item in value)
    return function(value)


def batch():
    return {
        "pixel_values": torch.randn(7, 12),
        "sizes": [torch.arange(3), (torch.ones(2).bool(), torch.randn(3, 2).t())],
    }


# --- multimodal-h2d


@pytest.mark.parametrize("release", ["0.8.4", "0.9.0.1", "0.10.2", "0.11.0"])
def test_as_kwargs_gives_the_same_tensors_each_a_copy(release):
    module = part_of(
        release,
        INPUTS,
        "MultiModalKwargs.as_kwargs",
        json_map_leaves=json_map_leaves,
        JSONTree=Annotation,
        BatchedTensorInputs=None,
    )
    inputs = batch()
    more = {"dtype": torch.bfloat16} if release == "0.9.0.1" else {}
    with rewritten(module, "MultiModalKwargs.as_kwargs") as sites:
        as_kwargs = module.MultiModalKwargs.as_kwargs
        off, on = off_and_on(sites, lambda: as_kwargs(inputs, device=torch.device("cpu"), **more))
        assert sites[0].calls == len(leaves(inputs))
        with pytest.raises(AttributeError):
            as_kwargs({"not a tensor": 3}, device=torch.device("cpu"))
    assert same(off, on) and (off["pixel_values"].dtype == torch.bfloat16) is bool(more)
    assert not {leaf.data_ptr() for leaf in leaves(inputs)} & {leaf.data_ptr() for leaf in leaves(on)}


@pytest.mark.parametrize("release", ["0.11.0", "0.11.2"])
def test_inputs_merged_by_field_are_grouped_and_copied_alike(release, monkeypatch):
    class Items(list):
        from_seq = classmethod(lambda cls, items: cls(items))

        def get_data(self, pin_memory):
            assert pin_memory
            return {
                "pixel_values": torch.cat([item.data for item in self]),
                "parts": [item.data for item in self],
                "cpu": torch.ones(2),
            }

    kwargs = types.ModuleType(INPUTS)
    kwargs.MultiModalKwargs, kwargs.MultiModalKwargsItems = None, Items
    for name in ("vllm", "vllm.multimodal"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, INPUTS, kwargs)
    module = part_of(release, UTILS, "group_mm_kwargs_by_modality", json_map_leaves=json_map_leaves)
    items = [SimpleNamespace(modality=m, data=torch.randn(2, 3)) for m in ("image", "image", "video")]
    more = {"multimodal_cpu_fields": {"cpu"}} if release == "0.11.2" else {}
    with rewritten(module, "group_mm_kwargs_by_modality") as sites:
        group = module.group_mm_kwargs_by_modality
        off, on = off_and_on(
            sites,
            lambda: list(group(items, device=torch.device("cpu"), pin_memory=True, merge_by_field_config=True, **more)),
        )
    assert same(off, on) and [(modality, number) for modality, number, _ in on] == [("image", 2), ("video", 1)]
    assert sites[0].calls == 5 + 2 * (not more)


# --- vision


class Blocks:
    """One block of a vision model: keeps what it is called with and returns what depends on all of it."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, **kwargs):
        self.seen.append({name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)})
        return x * 1.5 + len(self.seen)


MERGE, WINDOW, PATCH = 2, 8, 1
GRID = [[1, 8, 12], [2, 4, 4]]
TOKENS = sum(t * h * w for t, h, w in GRID)


class Rotary:
    """The rotary tables: one by length, or cosines and sines."""

    def __call__(self, length):
        return torch.arange(int(length) * 6).reshape(int(length), 6) / 7

    def get_cos_sin(self, length):
        return self(length).cos(), self(length).sin()


def transformer(kind, **more):
    """A vision transformer of `kind` without its weights."""
    made = object.__new__(kind)
    blocks = Blocks()
    vars(made).update(
        spatial_merge_size=MERGE, spatial_merge_unit=MERGE * MERGE, window_size=WINDOW, patch_size=PATCH,
        patch_embed=lambda x: x + 1, merger=lambda x: x.reshape(TOKENS // MERGE**2, -1), rotary_pos_emb=Rotary(),
        blocks=[blocks, blocks], fullatt_block_indexes=[1], attn_backend=None, seen=blocks.seen, **more,
    )  # fmt: skip
    return made


def plain_module(monkeypatch, kind):
    """`device` and `dtype` of a module are properties, which need its weights."""
    monkeypatch.setattr(kind, "device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(kind, "dtype", torch.float32, raising=False)


QWEN2_5_FORMS = {
    "0.8.4": (("rot_pos_emb", "get_window_index"), ("forward", "rot_pos_emb"), (3, 1)),
    "0.9.0.1": (("get_rope_by_thw", "rotary_pos_emb_thw", "get_window_index_thw"), ("forward",), (5,)),
    "0.10.2": (("get_rope_by_thw", "rotary_pos_emb_thw", "get_window_index_thw", "invert_permutation"), ("forward",), (5,)),
    "0.11.2": (("get_rope_by_thw", "rotary_pos_emb_thw", "get_window_index_thw", "invert_permutation"), ("forward",), (5,)),
    # The tables are found once for each grid, and kept.
    "0.14.1": (("get_rope_by_thw", "rotary_pos_emb_thw", "get_window_index_thw", "invert_permutation"), ("forward", "get_rope_by_thw", "rotary_pos_emb_thw"), (6, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("release", QWEN2_5_FORMS)
def test_qwen2_5_vision_sees_the_same_positions_windows_and_offsets(release, monkeypatch):
    methods, exchanged, calls = QWEN2_5_FORMS[release]
    name = "Qwen2_5_VisionTransformer."
    backends = dict.fromkeys(
        ("_Backend", "AttentionBackendEnum"), SimpleNamespace(FLASH_ATTN=1, XFORMERS=2, ROCM_AITER_FA=3)
    )
    wanted = [name + method for method in ("forward", "compute_attn_mask_seqlen", *methods)]
    module = part_of(release, QWEN2_5, *wanted, **backends)
    kind = module.Qwen2_5_VisionTransformer
    plain_module(monkeypatch, kind)
    x = torch.randn(TOKENS, 3)
    grid = torch.tensor(GRID) if release == "0.8.4" else GRID
    models = []

    def run():
        if hasattr(kind, "get_rope_by_thw"):
            kind.get_rope_by_thw.cache_clear()
        models.append(transformer(kind))
        first = models[-1].forward(x, grid)
        return first, models[-1].seen

    with rewritten(module, *(name + function for function in exchanged)) as sites:
        off, on = off_and_on(sites, run)
        assert tuple(site.calls for site in sites) == calls
        # The ring has been overwritten: what is kept of the grids is none of it.
        with forced_staging(1 << 18):
            del models[-1].seen[:]
            again = models[-1].forward(x, grid), models[-1].seen
    assert same(off, on) and same(off, again)
    assert len(on[1]) == 2 and all(seen for seen in on[1])


@pytest.mark.parametrize(
    "release, exchanged, calls",
    [
        ("0.8.4", ["rot_pos_emb"], [1]),
        ("0.11.0", ["rot_pos_emb"], [1]),
        ("0.11.2", ["rot_pos_emb", "forward"], [1, 1]),
        ("0.14.1", ["rot_pos_emb", "forward"], [2, 1]),
    ],
)
def test_qwen2_vision_sees_the_same_positions_and_offsets(release, exchanged, calls, monkeypatch):
    name = "Qwen2VisionTransformer."
    backends = dict.fromkeys(
        ("_Backend", "AttentionBackendEnum"), SimpleNamespace(FLASH_ATTN=1, XFORMERS=2, ROCM_AITER_FA=3)
    )
    methods = ("rot_pos_emb", "forward", "compute_attn_mask_seqlen")
    module = part_of(release, QWEN2, *(name + method for method in methods), **backends)
    kind = module.Qwen2VisionTransformer
    plain_module(monkeypatch, kind)
    x = torch.randn(TOKENS, 3)
    grid = torch.tensor(GRID) if release == "0.8.4" else GRID

    def run():
        model = transformer(kind)
        return model.forward(x, grid), model.seen

    with rewritten(module, *(name + function for function in exchanged)) as sites:
        off, on = off_and_on(sites, run)
    assert same(off, on) and [site.calls for site in sites] == calls


@pytest.mark.parametrize(
    "release, exchanged, calls",
    [("0.11.0", ["forward"], [1]), ("0.11.2", ["forward"], [2]), ("0.14.1", ["forward", "rot_pos_emb"], [1, 1])],
)
def test_qwen3_vision_sees_the_same_positions_and_offsets(release, exchanged, calls, monkeypatch):
    name = "Qwen3_VisionTransformer."
    backends = dict.fromkeys(
        ("_Backend", "AttentionBackendEnum"), SimpleNamespace(FLASH_ATTN=1, XFORMERS=2, ROCM_AITER_FA=3)
    )
    methods = ["rot_pos_emb", "forward", "compute_attn_mask_seqlen"] + ["rot_pos_ids"] * (release != "0.11.0")
    module = part_of(release, QWEN3, *(name + method for method in methods), **backends)
    kind = module.Qwen3_VisionTransformer
    plain_module(monkeypatch, kind)
    x = torch.randn(TOKENS, 3)

    def run():
        model = transformer(
            kind, deepstack_visual_indexes=[], fast_pos_embed_interpolate=lambda grid: torch.ones(TOKENS, 3)
        )
        return model.forward(x, GRID), model.seen

    with rewritten(module, *(name + function for function in exchanged)) as sites:
        off, on = off_and_on(sites, run)
    assert same(off, on) and [site.calls for site in sites] == calls


@pytest.mark.parametrize(
    "release, name, what",
    [
        ("0.11.0", QWEN2_5, "image"),
        ("0.11.0", QWEN2_5, "video"),
        ("0.14.1", QWEN2_5, "video"),
        ("0.14.1", QWEN3, "image"),
        ("0.14.1", QWEN3, "video"),
        ("0.20.2", QWEN3, "image"),
    ],
)
def test_positions_of_efficient_video_sampling_are_the_same(release, name, what):
    kind = {QWEN2_5: "Qwen2_5_VLForConditionalGeneration", QWEN3: "Qwen3VLForConditionalGeneration"}[name]
    qualname = f"{kind}._postprocess_{what}_embeds_evs"
    module = part_of(
        release,
        name,
        qualname,
        compute_mrope_for_media=lambda size, merge, **more: torch.arange(
            size[0] * size[1] * size[2] // merge**2 * 4
        ).view(-1, 4),
        compute_retention_mask=lambda emb, size, **more: torch.arange(len(emb)) % 3 > 0,
    )
    model = object.__new__(getattr(module, kind))
    vars(model).update(
        visual=SimpleNamespace(spatial_merge_size=MERGE),
        video_pruning_rate=0.3,
        is_multimodal_pruning_enabled=True,
        config=SimpleNamespace(vision_config=SimpleNamespace(tokens_per_second=2)),
    )
    embeds = tuple(torch.randn(t * h * w // MERGE**2, 5) for t, h, w in GRID)
    given = {f"{what}_grid_thw": torch.tensor(GRID), "second_per_grid_ts": torch.ones(2)}
    with rewritten(module, qualname) as sites:
        off, on = off_and_on(sites, lambda: getattr(model, qualname.partition(".")[2])(embeds, given))
    assert same(off, on) and len(on) == 2 and sites[0].calls == 2


# --- mrope-positions


def test_prepare_inputs_of_0_8_0_copies_its_m_rope_positions_at_the_moment_of_the_call():
    module = part_of("0.8.0", RUNNER, "GPUModelRunner._prepare_inputs", FlashAttentionMetadata=None)
    tokens, most = {"a": 5, "b": 2}, 64

    def runner():
        made = object.__new__(module.GPUModelRunner)
        cpu = {
            name: torch.zeros(most, dtype=torch.int64)
            for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens")
        }
        metadata = SimpleNamespace(query_start_loc=torch.tensor([0, 5, 7]))
        table = SimpleNamespace(commit=lambda number: None, get_cpu_tensor=lambda: torch.arange(2 * 8).reshape(2, 8))
        vars(made).update(
            attn_metadata_builder=SimpleNamespace(reorder_batch=lambda *args: False, build=lambda **kwargs: metadata),
            input_batch=SimpleNamespace(
                num_reqs=2, req_ids=list(tokens), num_computed_tokens_cpu=np.array([3, 9]), block_table=table,
                token_ids_cpu=np.zeros((2, most)), token_ids_cpu_tensor=torch.arange(2 * most).reshape(2, most),
            ),
            arange_np=np.arange(most), max_num_blocks_per_req=8, block_size=16, uses_mrope=True, lora_config=None,
            **{f"{name}_np": tensor.numpy() for name, tensor in cpu.items()},
            input_ids=torch.zeros(most, dtype=torch.int64), input_ids_cpu=torch.zeros(most, dtype=torch.int64),
            mrope_positions=torch.zeros(3, most + 1, dtype=torch.int64),
            mrope_positions_cpu=torch.zeros(3, most + 1, dtype=torch.int64),
            _calc_mrope_positions=lambda scheduled: made.mrope_positions_cpu.copy_(torch.arange(3 * (most + 1)).view(3, -1)),
            _compute_cascade_attn_prefix_len=lambda *args: 0,
        )  # fmt: skip
        return made

    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=7,
        num_scheduled_tokens=tokens,
        num_common_prefix_blocks=0,
        scheduled_spec_decode_tokens={},
    )

    def run():
        made = runner()
        made._prepare_inputs(scheduled)
        made.mrope_positions_cpu.fill_(-1)
        return made.mrope_positions, made.input_ids

    with rewritten(module, "GPUModelRunner._prepare_inputs") as sites:
        off, on = off_and_on(sites, run)
    assert same(off, on) and sites[0].calls == 1
    assert on[0][:, 6].tolist() == [6, most + 7, 2 * most + 8] and not on[0][:, 7:].any()
