"""The copies of real releases' models and metadata builders: their own functions rewritten and run on the CPU.

Only the function is compiled, from the release's own source; what it names of its module is made up here.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from h2d_patch.copies import EXPORTS, forced_staging
from h2d_patch.manifest import load
from h2d_patch.patching.install import build_rewrite
from h2d_patch.patching.recognise import Verdict, recognise
from h2d_patch.patching.rewrite import ModuleSource
from h2d_patch.patching.switch import Site

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch

pytestmark = pytest.mark.releases
MODELS = "vllm.model_executor.models"


class _Members:
    """The members of an enumeration, each its own name."""

    def __getattr__(self, name):
        return name


GLOBALS = {
    "__builtins__": __builtins__,
    "torch": torch,
    "nn": nn,
    "F": functional,
    "np": np,
    "AttentionBackendEnum": _Members(),
}


def function_of(release, module, qualname, **names):
    """One function of a release's module, with its source."""
    path = fetch(release) / (module.replace(".", "/") + ".py")
    source = ModuleSource(path.read_bytes(), str(path))
    (node,) = source.named(qualname)
    top = compile(ast.parse(path.read_bytes()), str(path), "exec", dont_inherit=True)
    code = top
    for part in qualname.split("."):
        (code,) = [c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == part]
    defaults = tuple(ast.literal_eval(default) for default in node.args.defaults) or None
    function = types.FunctionType(code, GLOBALS | names, qualname.rpartition(".")[2], defaults)
    return function, source, node


@contextlib.contextmanager
def rewritten(release, module, qualname, **names):
    """The function with the targets in it that this release's source is of; their site."""
    function, source, node = function_of(release, module, qualname, **names)
    site = Site()
    for name, export in EXPORTS.items():
        site.bind(name, export.bind(site))
    targets = [t for _, t in load().targets() if t.function == f"{module}:{qualname}"]
    found = [t for t in targets if recognise(t, source, node, None).verdict is Verdict.APPLIES]
    assert len(found) == 1
    undo = build_rewrite(function, source, source.definition_of(qualname, function.__code__), found[0].rewrites, site)()
    yield function, site
    undo()


def flat(value):
    """What there is of tensors in a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, SimpleNamespace):
        return flat(vars(value))
    if isinstance(value, dict):
        value = value.values()
    return (
        [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple, type({}.values()))) else []
    )


def compare(release, module, qualname, call, copies, **names):
    """`call(function)` with the fix off and on: the same tensors, and `copies` calls of ours, none of them the original's."""
    with rewritten(release, module, qualname, **names) as (function, site):
        off = flat(call(function))
        assert site.calls == 0
        site.on = True
        with forced_staging(1 << 20):
            on = flat(call(function))
    assert (site.calls, site.fallbacks) == (copies, 0), site.reasons
    assert len(off) == len(on) > 0
    for one, other in zip(off, on, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture
def without_pinning(monkeypatch):
    """Pinned memory, where there is none to be had."""
    for name in ("zeros", "empty"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, made=made, pin_memory=False, **kwargs: made(*size, **kwargs))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())


@pytest.mark.parametrize(
    ("release", "module"),
    [
        ("0.14.1", "vllm.v1.attention.backends.mla.common"),
        ("0.22.1", "vllm.model_executor.layers.attention.mla_attention"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefill_with_context_has_the_same_metadata(without_pinning, release, module, ranks):
    query = torch.tensor([0, 5, 9, 16], dtype=torch.int32)
    computed = torch.tensor([40, 0, 70], dtype=torch.int32)
    kind = SimpleNamespace(ChunkedContextMetadata=SimpleNamespace)

    class Prefill(SimpleNamespace):
        ChunkedContextMetadata = SimpleNamespace

    def cdiv(a, b):
        return -(-a // b)

    builder = SimpleNamespace(
        device=torch.device("cpu"),
        reorder_batch_threshold=1,
        query_len_support="VARLEN",
        chunked_prefill_workspace_size=64,
        chunked_prefill_workspace=None,
        aot_schedule=True,
        page_size=16,
        dcp_world_size=ranks,
        dcp_local_block_size=16,
        dcp_virtual_block_size=16 * ranks,
        cp_kv_cache_interleave_size=16,
        prefill_metadata_cls=Prefill,
        metadata_cls=SimpleNamespace,
        model_config=SimpleNamespace(get_head_size=lambda: 64, dtype=torch.float32),
        q_data_type=torch.float32,
        _prefill_backend=SimpleNamespace(prepare_metadata=lambda metadata: None),
        **dict.fromkeys(("_use_cudnn_prefill", "_use_fi_prefill", "_use_trtllm_ragged_prefill"), False),
    )
    common = SimpleNamespace(
        num_reqs=3,
        num_actual_tokens=16,
        max_query_len=7,
        max_seq_len=77,
        block_table_tensor=torch.zeros(3, 8, dtype=torch.int32),
        slot_mapping=torch.zeros(16, dtype=torch.int64),
        query_start_loc=query,
        query_start_loc_cpu=query,
        seq_lens=computed + query.diff(),
        seq_lens_cpu_upper_bound=computed + query.diff(),
        dcp_local_seq_lens=None,
        compute_num_computed_tokens=lambda: computed,
    )
    names = {
        "split_decodes_and_prefills": lambda *args, **kwargs: (0, 3, 0, 16),
        "QueryLenSupport": _Members(),
        "cdiv": cdiv,
        "round_down": lambda a, b: a // b * b,
        "get_dcp_local_seq_lens": lambda lens, *rest: lens.unsqueeze(-1).expand(-1, ranks),
        "MLACommonPrefillMetadata": Prefill,
        "CudnnPrefillMetadata": kind,
        "FlashInferPrefillMetadata": kind,
    }
    calls = []

    def build(function):
        made = function(builder, 0, common).prefill.chunked_context
        calls.append((made.token_to_seq, made.starts))
        return made

    compare(release, module, "MLACommonMetadataBuilder.build", build, 2, **names)
    token_to_seq, starts = calls[-1]
    assert token_to_seq.shape[0] == starts.shape[0] > 1 and set(token_to_seq.flatten().tolist()) == {0, 2}


@pytest.mark.parametrize("release", ["0.22.1", "0.26.0"])
def test_runner_v2_copies_arrays_and_tensors_as_they_are_at_the_call(without_pinning, release):
    def call(function):
        source = np.arange(7, dtype=np.int32)
        out = torch.zeros(7, dtype=torch.int32)
        assert function(source, out) is out
        made = function(torch.arange(5), None, torch.device("cpu"))
        wide = function(torch.arange(12).view(3, 4)[:, :2], None, torch.device("cpu"))
        source[:] = 9
        return out, made, wide

    compare(release, "vllm.v1.worker.gpu.buffer_utils", "async_copy_to_gpu", call, 3)


@pytest.mark.parametrize("release", ["0.22.1", "0.26.0"])
def test_runner_v2_runs_the_release_s_own_copy_where_there_is_no_staging(without_pinning, release):
    with rewritten(release, "vllm.v1.worker.gpu.buffer_utils", "async_copy_to_gpu") as (function, site):
        site.on = True
        assert function(np.arange(3), None, torch.device("cpu")).tolist() == [0, 1, 2]
    assert site.calls == 1 and site.fallbacks == 0


GRID = [[1, 4, 6], [2, 2, 4]]
ROTARY = torch.arange(0.0, 96.0).view(12, 8)
VISION = {
    "spatial_merge_size": 2,
    "hidden_stride": 2,
    "device": torch.device("cpu"),
}


class Rotary:
    def __call__(self, size):
        return ROTARY[:size]

    def get_cos_sin(self, size):
        return ROTARY[:size].cos(), ROTARY[:size].sin()


def positions(release, file, name):
    """A tower that has what `rot_pos_emb` uses of it."""
    tower = SimpleNamespace(rotary_pos_emb=Rotary(), **VISION)
    if file == "dots_ocr":
        by_grid = function_of(release, f"{MODELS}.{file}", f"{name}.get_pos_ids_by_grid")[0]
        tower.get_pos_ids_by_grid = lambda grid: by_grid(tower, grid)
    return tower


@pytest.mark.parametrize(
    ("release", "file", "name", "copies"),
    [
        ("0.11.0", "glm4_1v", "Glm4vVisionTransformer", 1),
        ("0.19.1", "glm4_1v", "Glm4vVisionTransformer", 2),
        ("0.22.1", "glm4_1v", "Glm4vVisionTransformer", 1),
        ("0.19.1", "qwen3_omni_moe_thinker", "Qwen3Omni_VisionTransformer", 2),
        ("0.22.1", "qwen3_omni_moe_thinker", "Qwen3Omni_VisionTransformer", 1),
        ("0.22.1", "ernie45_vl", "Ernie4_5_VisionTransformer", 1),
        ("0.28.0", "ernie45_vl", "Ernie4_5_VisionTransformer", 1),
        ("0.33.0", "siglip2navit", "Siglip2Encoder", 1),
        ("0.33.0", "openpangu_vl", "OpenPanguVisionTransformer", 1),
        ("0.33.0", "mimo_v2_omni", "MiMoVisionTransformer", 4),
        ("0.33.0", "dots_ocr", "DotsVisionTransformer", 1),
    ],
)
def test_a_vision_tower_s_positions_are_the_same(release, file, name, copies):
    tower = positions(release, file, name)
    grid = GRID if file == "dots_ocr" else torch.tensor(GRID)
    compare(release, f"{MODELS}.{file}", f"{name}.rot_pos_emb", lambda rotary: rotary(tower, grid), copies)


@pytest.mark.parametrize(("release", "copies"), [("0.22.1", 3), ("0.28.0", 2)])
def test_keye_s_images_and_videos_have_the_same_positions(release, copies):
    model = SimpleNamespace(
        visual=lambda **kwargs: [kwargs["position_ids"], kwargs["sample_indices"], kwargs["cu_seqlens"]],
        mlp_AR=lambda found, grid: found,
    )
    model.visual = type("Visual", (), {"dtype": torch.float32, "__call__": staticmethod(model.visual)})()
    names = {"async_tensor_h2d": lambda data, device, dtype=None: torch.tensor(data, dtype=dtype)}
    pixels, grid = torch.zeros(40, 3), torch.tensor(GRID)
    inputs = {"type": "pixel_values", "pixel_values": pixels, "image_grid_thw": grid}
    place = f"{MODELS}.keye", "BaseKeyeModule._process_image_input"
    compare(release, *place, lambda images: images(model, inputs), copies, **names)
    place = f"{MODELS}.keye", "BaseKeyeModule._process_video_embeds"
    compare(release, *place, lambda videos: videos(model, "pixel_values_videos", grid, pixels), copies, **names)


@pytest.mark.parametrize(("release", "copies"), [("0.22.1", 2), ("0.28.0", 1)])
def test_paddle_ocr_s_images_have_the_same_positions(release, copies):
    visual = type(
        "Visual",
        (),
        {"dtype": torch.float32, "__call__": lambda self, **kwargs: [kwargs["position_ids"], kwargs["cu_seqlens"]]},
    )()
    names = {"async_tensor_h2d": lambda data, device, dtype=None: torch.tensor(data, dtype=dtype)}
    compare(
        release,
        f"{MODELS}.paddleocr_vl",
        "PaddleOCRVLForConditionalGeneration.encode_image",
        lambda encode: encode(SimpleNamespace(visual=visual), torch.zeros(24, 3), torch.tensor(GRID[0])),
        copies,
        **names,
    )


def test_lfm2_gathers_the_same_tokens():
    def plain(x):
        return x

    projector = SimpleNamespace(
        factor=2, projector_use_layernorm=False, linear_1=plain, act=plain, linear_2=plain, layer_norm=plain
    )
    shapes = torch.tensor([[4, 6], [2, 4]])
    features = torch.randn(32, 5)
    place = f"{MODELS}.lfm2_vl", "Lfm2VLMultiModalProjector.forward"
    compare("0.22.1", *place, lambda forward: forward(projector, features, shapes), 1)


@pytest.mark.parametrize("release", ["0.20.2", "0.22.1"])
def test_phi_4_s_audio_mask_is_the_same(release):
    mask = torch.tril(torch.ones(1, 9, 9, dtype=torch.bool))
    encoder = SimpleNamespace(_streaming_mask=lambda *args: mask, chunk_size=3, left_chunk=1)
    call = torch.zeros(1, 9, 4), torch.device("cpu"), torch.ones(1, 7, dtype=torch.bool)
    place = f"{MODELS}.phi4mm_audio", "ConformerEncoder.calculate_hs_mask"
    compare(release, *place, lambda masked: masked(encoder, *call), 1)


@pytest.mark.parametrize("release", ["0.22.1", "0.28.0"])
def test_idefics_2_s_positions_are_the_same(release):
    torch.manual_seed(0)
    embeddings = SimpleNamespace(
        patch_embedding=nn.Conv2d(3, 8, 2, 2),
        position_embedding=nn.Embedding(16, 8),
        patch_size=2,
        num_patches_per_side=4,
    )
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, :3, :2] = mask[1, :4, :4] = True
    pixels = torch.randn(2, 3, 8, 8)

    @torch.inference_mode()
    def call(forward):
        return forward(embeddings, pixels, mask)

    place = f"{MODELS}.idefics2_vision_model", "Idefics2VisionEmbeddings.forward"
    compare(release, *place, call, 1, gpu_sync_allowed=contextlib.nullcontext)


def test_ernie_4_5_s_resampler_selects_the_same_slices():
    def plain(x):
        return x, None

    resampler = SimpleNamespace(
        spatial_conv_size=2,
        use_temporal_conv=True,
        spatial_conv_reshape=lambda x, size: x.reshape(-1, x.shape[-1] * size**2),
        **dict.fromkeys(("spatial_linear1", "spatial_linear2", "temporal_linear1", "temporal_linear2", "mlp"), plain),
        **dict.fromkeys(("spatial_gelu", "spatial_norm", "temporal_gelu", "temporal_norm", "after_norm"), lambda x: x),
    )
    grid = torch.tensor([[2, 4, 4], [4, 2, 4]])
    tokens = torch.randn(int(grid.prod(-1).sum()), 3)
    place = f"{MODELS}.ernie45_vl", "VariableResolutionResamplerModel.forward"
    compare("0.22.1", *place, lambda forward: forward(resampler, tokens, grid), 2)


def test_pixtral_s_positions_are_the_same():
    tables = torch.randn(4, 4, 3)
    tower = SimpleNamespace(
        patch_conv=nn.Conv2d(3, 8, 2, 2),
        ln_pre=lambda x: x,
        dtype=torch.float32,
        device=torch.device("cpu"),
        freqs_cis=tables,
        transformer=lambda patches, mask, freqs_cis: torch.cat([patches, freqs_cis.unsqueeze(0)], dim=-1),
    )
    images = [torch.randn(3, 4, 8), torch.randn(3, 6, 6)]
    meshgrid = function_of("0.22.1", f"{MODELS}.pixtral", "position_meshgrid")[0]
    mask = SimpleNamespace(from_seqlens=lambda lens: None)
    names = {
        "position_meshgrid": meshgrid,
        "USE_XFORMERS_OPS": True,
        "xops": SimpleNamespace(fmha=SimpleNamespace(attn_bias=SimpleNamespace(BlockDiagonalMask=mask))),
    }
    place = f"{MODELS}.pixtral", "VisionTransformer.forward"
    compare("0.22.1", *place, torch.inference_mode()(lambda forward: forward(tower, images)), 1, **names)
