"""`check` on real releases says what their sources show, and notices when a source has changed."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from h2d_patch.cli import main
from h2d_patch.manifest import load
from h2d_patch.patching import switch
from h2d_patch.patching.rewrite import ModuleSource
from h2d_patch.process import STARTUP_CLASS, STARTUP_METHOD, STARTUP_MODULES
from h2d_patch.report.check import Site, check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from fetch_release import fetch  # noqa: E402

pytestmark = pytest.mark.releases

RELEASES = [
    "0.8.0", "0.8.4", "0.9.0.1", "0.10.2", "0.11.0", "0.11.2", "0.14.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.26.0",
    "0.27.1", "0.28.0", "0.30.0", "0.33.0",
]  # fmt: skip
NONE = "<0"
# Read off the sources of all releases, one row for each target in the order of the manifest: where it applies, and where
# upstream's own fix is. It is absent everywhere else, and refused nowhere.
EXPECTED = {
    "multimodal-h2d inputs:_nested_tensors_h2d": (">=0.13,<0.30", ">=0.30"),
    "multimodal-h2d inputs:MultiModalKwargs.as_kwargs (device)": (">=0.8,<0.9", NONE),
    "multimodal-h2d inputs:MultiModalKwargs.as_kwargs (device=device)": (">=0.9,<0.13", NONE),
    "multimodal-h2d utils:group_mm_kwargs_by_modality (waits)": ("==0.11.0", NONE),
    "multimodal-h2d utils:group_mm_kwargs_by_modality": (">=0.11.1,<0.13", NONE),
    "vision-rope qwen3_vl:Qwen3_VisionTransformer.rot_pos_emb": (">=0.12,<0.28", ">=0.28"),
    "vision-rope qwen3_vl:Qwen3_VisionTransformer.forward (waits)": ("==0.11.0", NONE),
    "vision-rope qwen3_vl:Qwen3_VisionTransformer.forward": (">=0.11.1,<0.12", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.forward": (">=0.12,<0.21", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.prepare_encoder_metadata": (">=0.21,<0.30", ">=0.30"),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.rotary_pos_emb_thw": (">=0.22,<0.29", ">=0.29"),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.get_rope_by_thw": (">=0.22,<0.30", ">=0.30"),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.get_rope_by_thw (index)": (">=0.12,<0.22", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_image_embeds_evs": (
        ">=0.22,<0.30",
        ">=0.30",
    ),
    "vision-h2d qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_video_embeds_evs": (
        ">=0.22,<0.30",
        ">=0.30",
    ),
    "vision-h2d qwen3_vl:Qwen3VLForConditionalGeneration._postprocess_image_embeds_evs": (">=0.22,<0.30", ">=0.30"),
    "vision-h2d qwen3_vl:Qwen3VLForConditionalGeneration._get_expanded_positions": (">=0.22,<0.30", ">=0.30"),
    "vision-h2d qwen2_vl:Qwen2VisionTransformer.forward": (">=0.11.1,<0.22", NONE),
    "vision-h2d qwen2_vl:Qwen2VisionTransformer.rot_pos_emb": (">=0.22,<0.29", ">=0.29"),
    "vision-h2d qwen2_vl:Qwen2VisionTransformer.prepare_encoder_metadata": (">=0.22,<0.30", ">=0.30"),
    "vision-h2d multimodal:MultiModalMixin._get_image_features": (">=0.29,<0.30", ">=0.30,<0.32"),
    "vision-h2d glm4_1v:Glm4vVisionTransformer.rot_pos_emb (>=0.9.2,<0.12)": (">=0.9.2,<0.12", NONE),
    "vision-h2d glm4_1v:Glm4vVisionTransformer.rot_pos_emb (>=0.12,<0.22)": (">=0.12,<0.22", ">=0.22.0"),
    "vision-h2d glm4_1v:Glm4vVisionTransformer.rot_pos_emb (>=0.22,<0.29)": (">=0.22,<0.29", ">=0.29.0"),
    "vision-h2d glm4_1v:Glm4vVisionTransformer.forward": (">=0.13,<0.24", NONE),
    "vision-h2d glm_ocr:GlmOcrVisionTransformer.forward": (">=0.16,<0.30", ">=0.30.0"),
    "vision-h2d qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.rot_pos_emb (>=0.11.1,<0.12)": (
        ">=0.11.1,<0.12",
        NONE,
    ),
    "vision-h2d qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.rot_pos_emb (>=0.12,<0.22)": (
        ">=0.12,<0.22",
        ">=0.22.0",
    ),
    "vision-h2d qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.rot_pos_emb (>=0.22,<0.29)": (
        ">=0.22,<0.29",
        ">=0.29.0",
    ),
    "vision-h2d qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.forward": (">=0.24,<0.30", ">=0.30.0"),
    "vision-h2d keye:KeyeForConditionalGeneration._process_image_input": (">=0.9.2,<0.10.2", NONE),
    "vision-h2d keye:KeyeForConditionalGeneration._process_video_input": (">=0.9.2,<0.10.2", NONE),
    "vision-h2d keye:BaseKeyeModule._process_image_input (>=0.10.2,<0.28)": (">=0.10.2,<0.28", NONE),
    "vision-h2d keye:BaseKeyeModule._process_video_embeds (>=0.10.2,<0.28)": (">=0.10.2,<0.28", NONE),
    "vision-h2d keye:BaseKeyeModule._process_image_input (>=0.28,<0.30)": (">=0.28,<0.30", ">=0.30.0"),
    "vision-h2d keye:BaseKeyeModule._process_video_embeds (>=0.28,<0.30)": (">=0.28,<0.30", ">=0.30.0"),
    "vision-h2d paddleocr_vl:PaddleOCRVLForConditionalGeneration.encode_image (>=0.11.1,<0.28)": (
        ">=0.11.1,<0.28",
        NONE,
    ),
    "vision-h2d paddleocr_vl:PaddleOCRVLForConditionalGeneration.encode_image (>=0.28,<0.30)": (
        ">=0.28,<0.30",
        ">=0.30.0",
    ),
    "vision-h2d ernie45_vl:Ernie4_5_VisionTransformer.rot_pos_emb (>=0.10.2,<0.28)": (">=0.10.2,<0.28", ">=0.28.0"),
    "vision-h2d ernie45_vl:Ernie4_5_VisionTransformer.rot_pos_emb (>=0.28,<0.29)": (">=0.28,<0.29", ">=0.29.0"),
    "vision-h2d ernie45_vl:Ernie4_5_VisionTransformer.prepare_encoder_metadata": (">=0.28,<0.30", ">=0.30.0"),
    "vision-h2d ernie45_vl:VariableResolutionResamplerModel.forward": (">=0.10.2,<0.28", ">=0.28.0"),
    "vision-h2d hunyuan_vision:HunYuanVisionTransformer.forward": (">=0.12,<0.29", NONE),
    "vision-h2d kanana_v:CustomQwen2VLVE.forward": (">=0.14,<0.29", ">=0.29.0"),
    "vision-h2d idefics2_vision_model:Idefics2VisionEmbeddings.forward (>=0.8,<0.28)": (">=0.8,<0.28", NONE),
    "vision-h2d idefics2_vision_model:Idefics2VisionEmbeddings.forward (>=0.28,<0.29)": (">=0.28,<0.29", NONE),
    "vision-h2d pixtral:VisionTransformer.forward": (">=0.8,<0.33", NONE),
    "vision-h2d pixtral:PixtralHFVisionModel.forward": (">=0.8", NONE),
    "vision-h2d dots_ocr:DotsVisionTransformer.rot_pos_emb": (">=0.11", NONE),
    "vision-h2d siglip2navit:Siglip2Encoder.rot_pos_emb": (">=0.10.2", NONE),
    "vision-h2d openpangu_vl:OpenPanguVisionTransformer.rot_pos_emb": (">=0.16", NONE),
    "vision-h2d mimo_v2_omni:MiMoVisionTransformer.rot_pos_emb": (">=0.21", NONE),
    "vision-h2d mimo_v2_omni:MiMoVisionTransformer.forward": (">=0.21", NONE),
    "vision-h2d lfm2_vl:Lfm2VLMultiModalProjector.forward": (">=0.15", NONE),
    "vision-h2d lfm2_vl:Lfm2VLForConditionalGeneration._get_lfm2vl_projector_gather_idx": (">=0.24", NONE),
    "vision-h2d cohere_compass:Cohere_VisionTransformer.rot_pos_emb": (">=0.30", NONE),
    "vision-h2d cohere_compass:CohereCompassForConditionalGeneration._postprocess_image_embeds_evs": (">=0.30", NONE),
    "vision-h2d phi4mm_audio:ConformerEncoder.calculate_hs_mask (>=0.8,<0.22)": (">=0.8,<0.22", NONE),
    "vision-h2d phi4mm_audio:TransformerEncoderBase.forward_embeddings (>=0.18,<0.22)": (">=0.18,<0.22", NONE),
    "vision-h2d phi4mm_audio:ConformerEncoder.calculate_hs_mask (>=0.22,<0.29)": (">=0.22,<0.29", ">=0.29.0"),
    "vision-h2d phi4mm_audio:TransformerEncoderBase.forward_embeddings (>=0.22,<0.29)": (">=0.22,<0.29", ">=0.29.0"),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.forward (five copies)": (">=0.11,<0.12", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.forward (copies and index)": (">=0.9,<0.11", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.forward (index)": (">=0.8,<0.9", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.rot_pos_emb (index)": (">=0.8,<0.9", NONE),
    "vision-h2d qwen2_5_vl:Qwen2_5_VisionTransformer.rotary_pos_emb_thw (index)": (">=0.12,<0.22", ">=0.22"),
    "vision-h2d qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_image_embeds_evs (waits)": (
        ">=0.11,<0.22",
        NONE,
    ),
    "vision-h2d qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_video_embeds_evs (waits)": (
        ">=0.11,<0.22",
        NONE,
    ),
    "vision-h2d qwen3_vl:Qwen3VLForConditionalGeneration._postprocess_image_embeds_evs (waits)": (">=0.13,<0.22", NONE),
    "vision-h2d qwen3_vl:Qwen3VLForConditionalGeneration._postprocess_video_embeds_evs (waits)": (">=0.13,<0.17", NONE),
    "vision-h2d qwen3_vl:Qwen3VLForConditionalGeneration._get_expanded_positions (waits)": (">=0.17,<0.22", NONE),
    "vision-h2d qwen3_vl:Qwen3_VisionTransformer.forward": (">=0.11.1,<0.17", NONE),
    "vision-h2d qwen2_vl:Qwen2VisionTransformer.rot_pos_emb (index, one table)": (">=0.8,<0.12", NONE),
    "vision-h2d qwen2_vl:Qwen2VisionTransformer.rot_pos_emb (index, two tables)": (">=0.12,<0.22", ">=0.22"),
    "mrope-positions gpu_model_runner:GPUModelRunner._prepare_inputs (M)": (">=0.10.2,<0.28", ">=0.28"),
    "mrope-positions gpu_model_runner:GPUModelRunner._prepare_inputs (M, two tensors)": (">=0.8,<0.10.2", NONE),
    "mrope-positions gpu_model_runner:GPUModelRunner._prepare_inputs (XD)": (">=0.12,<0.29", "==0.29.0"),
    "flashinfer-plan flashinfer:FlashInferMetadataBuilder.build": (">=0.11.1,<0.30", ">=0.30"),
    "flashinfer-plan flashinfer:FlashInferMetadataBuilder._compute_flashinfer_kv_metadata": (">=0.17,<0.29", ">=0.29"),
    "flashinfer-plan prefill:BatchPrefillWithPagedKVCacheWrapper.plan": (NONE, NONE),
    "flashinfer-plan decode:BatchDecodeWithPagedKVCacheWrapper.plan": (NONE, NONE),
    "flashinfer-plan decode:fast_decode_plan": (NONE, NONE),
    "kv-swap cpu_gpu:CpuGpuOffloadingHandler.transfer_async": (">=0.11,<0.13", NONE),
    "kv-swap cpu_gpu:SingleDirectionOffloadingHandler.transfer_async (0.13, 0.14)": (">=0.13,<0.15", NONE),
    "kv-swap cpu_gpu:SingleDirectionOffloadingHandler.transfer_async (0.15 to 0.19)": (">=0.15,<0.20", NONE),
    "kv-swap cpu_gpu:SingleDirectionOffloadingHandler.transfer_async (0.20)": (">=0.20,<0.21", NONE),
    "kv-swap gpu_worker:SingleDirectionOffloadingHandler.transfer_async (0.21, 0.22)": (">=0.21,<0.23", NONE),
    "kv-swap gpu_worker:SingleDirectionOffloadingHandler.transfer_async (0.23 on)": (">=0.23", NONE),
    "kv-swap cuda_mem_ops:copy_blocks (to 0.28)": (">=0.19,<0.29", NONE),
    "kv-swap cuda_mem_ops:copy_blocks (0.29 on)": (">=0.29", NONE),
    "mla-context common:MLACommonMetadataBuilder.build": (">=0.12,<0.15", NONE),
    "mla-context mla_attention:MLACommonMetadataBuilder.build": (">=0.15,<0.24", ">=0.24.0"),
    "runner-v2-copies buffer_utils:async_copy_to_gpu (>=0.18,<0.24)": (">=0.18,<0.24", NONE),
    "runner-v2-copies buffer_utils:async_copy_to_gpu (>=0.24,<0.30)": (">=0.24,<0.30", NONE),
    "list-tensors triton_attn:TritonAttentionMetadata.mm_prefix_range_tensor": (">=0.13,<0.20", NONE),
    "list-tensors triton_attn:TritonAttentionMetadata.compute_mm_prefix_range_tensor": (">=0.20,<0.21", ">=0.21,<0.24"),
    "list-tensors flash_attn:FlashAttentionMetadataBuilder.build": (">=0.10,<0.32", NONE),
    "list-tensors utils:get_dcp_local_seq_lens": (">=0.12,<0.31", NONE),
    "list-tensors sampler:Sampler.gather_specific_token_logprobs": (">=0.20,<0.22", ">=0.22"),
    "list-tensors radio:RadioInternVisionModel.inter_image_mask_metadata": (">=0.18,<0.19", NONE),
    "list-tensors radio:RadioInternVisionModel._inter_image_mask_metadata_from_seq_lens": (">=0.19", NONE),
    "list-tensors lfm2_vl:Lfm2VLForConditionalGeneration.image_pixels_to_features": (">=0.15", NONE),
    "list-tensors lfm2_vl:Lfm2VLForConditionalGeneration._get_lfm2vl_cu_seqlens": (">=0.24", NONE),
    "list-tensors glm4_1v:Glm4vVisionEmbeddings.forward": (">=0.10.2,<0.28", ">=0.28"),
    "list-tensors glm4_1v:Glm4vVisionTransformer.pos_embeds_interpolate": (">=0.24,<0.28", ">=0.28"),
}


def expected(release: str) -> list[str]:
    """The verdict on each target in `release`."""
    return [
        "applies" if release in SpecifierSet(applies) else "upstream" if release in SpecifierSet(upstream) else "absent"
        for applies, upstream in EXPECTED.values()
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_each_target_has_the_verdict_that_the_release_s_source_implies(release: str) -> None:
    folder = fetch(release)
    start = time.process_time()  # on a busy machine the wall clock says little
    site = Site(folder)
    found = list(check(load(), site))
    assert time.process_time() - start < 3
    assert site.release() == release
    rows = list(zip(EXPECTED.items(), found, strict=True))
    for (name, _), row in rows:
        assert row.fix in name and row.function.partition(":")[2] in name
    assert [row.verdict.value for row in found] == expected(release)
    assert all(row.reason for row in found if row.verdict.value in ("upstream", "absent"))


@pytest.mark.parametrize(
    ("release", "file", "function"),
    [
        ("0.10.1.1", "keye", "KeyeForConditionalGeneration._process_image_input"),
        ("0.10.1.1", "keye", "KeyeForConditionalGeneration._process_video_input"),
        ("0.11.2", "qwen3_omni_moe_thinker", "Qwen3Omni_VisionTransformer.rot_pos_emb"),
        ("0.24.0", "mla_attention", "MLACommonMetadataBuilder.build"),
    ],
)
def test_a_form_of_few_releases_is_recognised_there(release: str, file: str, function: str) -> None:
    rows = [row for row in check(load(), Site(fetch(release))) if row.function.endswith(f".{file}:{function}")]
    expected = "upstream" if file == "mla_attention" else "applies"
    assert [row.verdict.value for row in rows if row.verdict.value != "absent"] == [expected]


def test_a_target_is_expected_to_have_the_fault_exactly_where_it_applies() -> None:
    spans = dict(zip(EXPECTED, (target.releases for _, target in load().targets()), strict=True))
    of_vllm = {name: span for name, span in spans.items() if EXPECTED[name] != (NONE, NONE)}
    for release in (f"0.{minor}.{micro}" for minor in range(8, 34) for micro in range(3)):
        claimed = [name for name, span in of_vllm.items() if release in span]
        assert claimed == [name for name in of_vllm if release in SpecifierSet(EXPECTED[name][0])], release


@pytest.mark.parametrize("release", RELEASES)
def test_what_applies_can_be_compiled_into_the_release_s_own_functions(release: str) -> None:
    root, modules = fetch(release), defaultdict(list)
    for (_, target), row in zip(load().targets(), check(load(), Site(root)), strict=True):
        if row.verdict.value == "applies":
            modules[target.module].append(target)
    built = 0
    for name, targets in modules.items():
        path = root / (name.replace(".", "/") + ".py")
        source = ModuleSource(path.read_bytes(), str(path))
        codes = dict(functions(compile(path.read_bytes(), str(path), "exec", dont_inherit=True)))
        for qualname in dict.fromkeys(target.qualname for target in targets if target.rewrites):
            site = switch.Site()
            exchanges = [(rewrite, site) for t in targets if t.qualname == qualname for rewrite in t.rewrites]
            code = codes[qualname]
            new = source.build(source.definition_of(qualname, code), code, exchanges)
            assert site.name in names(new) and site.name not in names(code)
            built += len(exchanges)
    assert built >= 2


def functions(code: types.CodeType, scope: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """(qualified name, code) of every function and class below."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield scope + constant.co_name, constant
            yield from functions(constant, f"{scope}{constant.co_name}.")


def names(code: types.CodeType) -> set[str]:
    """The global names in a function and the lambdas in it."""
    return {*code.co_names}.union(*(names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def calls(definition: ast.AST) -> list[str]:
    """The names that are called in it, in order."""
    found = [node.func for node in ast.walk(definition) if isinstance(node, ast.Call)]
    return [getattr(function, "id", getattr(function, "attr", "")) for function in found]


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_loads_plugins_in_a_worker_before_its_device_comes_up_where_we_hook_it(release: str) -> None:
    root = fetch(release)
    assert "vllm.general_plugins" in (root / "vllm/plugins/__init__.py").read_text(encoding="utf-8")
    paths = [root / (module.replace(".", "/") + ".py") for module in STARTUP_MODULES]
    (source,) = [
        source
        for source in (ModuleSource(path.read_bytes(), str(path)) for path in paths if path.exists())
        if source.named(f"{STARTUP_CLASS}.{STARTUP_METHOD}")
    ]
    (start,) = source.named(f"{STARTUP_CLASS}.{STARTUP_METHOD}")
    assert "init_device" in calls(start)
    (init,) = source.named(f"{STARTUP_CLASS}.init_worker")
    # Before the worker's class is imported, and with it the functions to be patched.
    assert "load_general_plugins" in calls(init) and "init_device" not in calls(init)
    lines = {
        name: [n.lineno for n in ast.walk(init) if isinstance(n, ast.Call) and name in calls(n)]
        for name in ("load_general_plugins", "resolve_obj_by_qualname")
    }
    assert min(lines["load_general_plugins"]) < min(lines["resolve_obj_by_qualname"])
    core = root / "vllm/v1/engine/core.py"
    loads = "load_general_plugins" in calls(ast.parse(core.read_text(encoding="utf-8")))
    assert loads is (not release.startswith("0.8."))  # there, a core has what its worker or the server's process loaded


COPY = """            self.mrope_positions.gpu[:, :total_num_scheduled_tokens].copy_(
                self.mrope_positions.cpu[:, :total_num_scheduled_tokens],
                non_blocking=True,
            )
"""
ROWS = """            for row in range(3):
                self.mrope_positions.gpu[row, :total_num_scheduled_tokens].copy_(
                    self.mrope_positions.cpu[row, :total_num_scheduled_tokens], non_blocking=True
                )
"""
ONE_LINE = " ".join(COPY.split()).replace("( ", "(").replace(", )", ")")


def under(header: str) -> str:
    return f"            {header}\n" + "".join(f"    {line}\n" for line in COPY.splitlines())


MUTATIONS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "formatting": (lambda s: s.replace(COPY, f"            {ONE_LINE}  # as before\n"), "applies", ""),
    "renamed variable": (lambda s: s.replace("total_num_scheduled_tokens", "n_tokens"), "applies", ""),
    "another keyword": (lambda s: s.replace(COPY, COPY.replace("True", "False")), "refused", "occurs 0 times"),
    "another buffer": (lambda s: s.replace(COPY, COPY.replace("mrope_positions.cpu", "mrope_cpu")), "refused", "0 times"),
    "other columns": (lambda s: s.replace(COPY, COPY.replace(".cpu[:, :", ".cpu[:, 1:")), "refused", "occurs 0 times"),
    "a second copy": (lambda s: s.replace(COPY, COPY + COPY), "refused", "occurs 2 times"),
    "wrapped in a call": (lambda s: s.replace(COPY, f"            record({ONE_LINE})\n"), "refused", "not a statement"),
    "in a lambda": (lambda s: s.replace(COPY, f"            (lambda: {ONE_LINE})()\n"), "refused", "not a statement"),
    "a condition around it": (lambda s: s.replace(COPY, under("if self.use_gpu:")), "refused", "directly under"),
    "a stream around it": (lambda s: s.replace(COPY, under("with stream(s):")), "refused", "directly under"),
    "a changed condition": (lambda s: s.replace("        if self.uses_mrope:\n            # Only relevant for models using M-RoPE (e.g, Qwen2-VL)\n            self.mrope_positions.gpu", "        if self.uses_mrope and more:\n            self.mrope_positions.gpu"), "refused", "directly under"),
    "moved away": (lambda s: s.replace(COPY, "            self._copy_mrope()\n"), "refused", "occurs 0 times"),
    "upstream's fix": (lambda s: s.replace(COPY, ROWS), "upstream", "upstream's own fix"),
    "upstream's fix beside it": (lambda s: s.replace(COPY, COPY + ROWS), "upstream", "upstream's own fix"),
}  # fmt: skip


@pytest.fixture(scope="module")
def site_0_22_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what `check` reads of 0.22.1's M-RoPE, to alter."""
    source = fetch("0.22.1")
    site = tmp_path_factory.mktemp("site")
    for name in ("vllm/__init__.py", "vllm/_version.py", "vllm/v1/worker/gpu_model_runner.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, site / name)
    return site


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_altered_prepare_inputs_is_judged_by_what_it_means(site_0_22_1: Path, name: str) -> None:
    change, verdict, says = MUTATIONS[name]
    path = site_0_22_1 / "vllm/v1/worker/gpu_model_runner.py"
    original = path.read_text(encoding="utf-8")
    altered = change(original)
    assert altered != original
    path.write_text(altered, encoding="utf-8")
    try:
        found = [row for row in check(load(), Site(site_0_22_1)) if row.fix == "mrope-positions"]
    finally:
        path.write_text(original, encoding="utf-8")
    assert found[0].verdict.value == verdict and says in found[0].reason
    assert [row.verdict.value for row in found[1:]] == ["absent", "applies"], "XD-RoPE, beside it, is as it was"


def test_the_command_prints_json_and_says_refusals_in_its_exit_status(site_0_22_1, capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["check", "--json", "--site", str(site_0_22_1)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["vllm"] == "0.22.1"
    assert {"fix", "function", "verdict", "reason"} == set(printed["targets"][0])
    path = site_0_22_1 / "vllm/v1/worker/gpu_model_runner.py"
    original = path.read_bytes()
    path.write_bytes(original.replace(b"self.mrope_positions.cpu[:, :total", b"self.mrope_positions.cpu[:, 1:total"))
    try:
        assert main(["check", "--site", str(site_0_22_1)]) == 1
    finally:
        path.write_bytes(original)
    assert "refused" in capsys.readouterr().out


def test_forms_for_other_releases_are_left_out_unless_asked_for(capsys) -> None:  # type: ignore[no-untyped-def]
    site = str(fetch("0.22.1"))
    assert main(["check", "--json", "--site", site]) == 0
    targets = json.loads(capsys.readouterr().out)["targets"]
    verdicts = {
        verdict: [t for t in targets if t["verdict"] == verdict] for verdict in ("applies", "upstream", "absent")
    }
    assert main(["check", "--site", site]) == 0
    table, hidden, summary = capsys.readouterr().out.split("\n\n")
    rows = table.splitlines()[3:]
    assert len(rows) == len(verdicts["applies"]) + len(verdicts["upstream"]) > 0
    assert not any(" absent " in row for row in rows)
    assert hidden == f"and {len(verdicts['absent'])} absent: forms for other releases (--all shows them)"
    lines = dict(line.split(": ", 1) for line in summary.splitlines())
    assert list(lines) == list(load().fixes)
    assert lines["kv-swap"] == "2 apply, 6 absent" and lines["mla-context"] == "1 applies, 1 absent"
    assert lines["flashinfer-plan"] == "2 apply, 3 absent (off by default)"
    assert main(["check", "--all", "--site", site]) == 0
    everything = capsys.readouterr().out.splitlines()
    assert [row.split()[:1] for row in everything[3:]] == [[t["fix"]] for t in targets]


def test_a_refusal_and_an_absence_that_is_not_the_release_s_are_always_shown(site_0_22_1: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = site_0_22_1 / "vllm/v1/worker/gpu_model_runner.py"
    original = path.read_bytes()
    path.write_bytes(original.replace(b"self.mrope_positions.cpu[:, :total", b"self.mrope_positions.cpu[:, 1:total"))
    try:
        assert main(["check", "--site", str(site_0_22_1)]) == 1
    finally:
        path.write_bytes(original)
    shown = capsys.readouterr().out
    assert "mrope-positions: 1 refused, 1 applies, 1 absent" in shown.splitlines()
    (row,) = [row for row in shown.splitlines() if "_nested_tensors_h2d" in row]  # whose module this copy does not have
    assert " absent " in row and "vLLM 0.22.1 has this function" in row


def test_a_fix_of_one_s_own_that_is_absent_is_shown_with_the_reason(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "ours.toml").write_text(
        "manifest = 1\n[patch.ours]\nwhy = 'x'\n[[patch.ours.target]]\nfunction = 'acme_vision:f'\n"
        "[[patch.ours.target.rewrite]]\nfind = 'S.to(D, non_blocking=True)'\nput = 'to_device(S, D)'\n"
    )
    monkeypatch.setenv("H2D_PATCH_MANIFEST", str(tmp_path / "ours.toml"))
    assert main(["check", "--site", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert rows[0].split(maxsplit=3) == ["ours", "acme_vision:f", "absent", "there is no module acme_vision here"]
    assert "ours: 1 absent" in rows


def test_a_damaged_source_file_is_refused_not_a_crash(site_0_22_1: Path) -> None:
    path = site_0_22_1 / "vllm/v1/worker/gpu_model_runner.py"
    original = path.read_bytes()
    path.write_bytes(original[:40_000])
    try:
        found = [row for row in check(load(), Site(site_0_22_1)) if row.fix == "mrope-positions"]
    finally:
        path.write_bytes(original)
    assert {row.verdict.value for row in found} == {"refused"}
    assert "cannot be read as source" in found[0].reason


def test_check_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from h2d_patch.cli import main; code = main(['check', '--site', sys.argv[1]]);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch', 'triton', 'numpy')), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(fetch("0.22.1"))], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    "deep",
    ["x = " + "-" * 100_000 + "1\n", "x = " + "'a'+" * 20_000 + "'a'\n", "if a: pass\n" + "elif a: pass\n" * 1200],
)
def test_source_that_is_nested_too_deeply_is_refused_not_a_crash(site_0_22_1: Path, deep: str) -> None:
    path = site_0_22_1 / "vllm/v1/worker/gpu_model_runner.py"
    original = path.read_text(encoding="utf-8")
    path.write_text(original + "\n" + deep, encoding="utf-8")
    try:
        found = [row for row in check(load(), Site(site_0_22_1)) if row.fix == "mrope-positions"]
    finally:
        path.write_text(original, encoding="utf-8")
    assert {row.verdict.value for row in found} <= {"refused", "applies"}


def test_check_says_what_h2d_patch_leaves_out_and_finds_single_file_modules(
    tmp_path: Path, monkeypatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "flat_model.py").write_text("def f(x, d):\n    return x.to(d, non_blocking=True)\n")
    (tmp_path / "ours.toml").write_text(
        "manifest = 1\n[patch.ours]\nwhy = 'x'\ndefault = false\n[[patch.ours.target]]\nfunction = 'flat_model:f'\n"
        "[[patch.ours.target.rewrite]]\nfind = 'S.to(D, non_blocking=True)'\nput = 'to_device(S, D)'\n"
    )
    monkeypatch.setenv("H2D_PATCH_MANIFEST", str(tmp_path / "ours.toml"))
    for value, reason in (("", "off by default"), ("ours", ""), ("kv-swap", "not selected by H2D_PATCH")):
        monkeypatch.setenv("H2D_PATCH", value)
        assert main(["check", "--json", "--site", str(tmp_path)]) == 0
        row = json.loads(capsys.readouterr().out)["targets"][-1]
        assert (row["verdict"], row["reason"]) == ("applies", reason)
