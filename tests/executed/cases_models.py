"""What the vision and audio models' functions touch."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from forms import CPU, PASSED_BY, Call, Form, World, case
from pretended import frozen
from torch import nn

M = "vllm.model_executor.models"
MERGE, WINDOW = 2, 8
GRID = [[1, 8, 12], [2, 4, 4]]  # frames, rows and columns of patches of an image and a video
TOKENS = sum(t * h * w for t, h, w in GRID)
TOWERS = ("qwen2_5_vl:Qwen2_5_VisionTransformer", "qwen2_vl:Qwen2VisionTransformer", "qwen3_vl:Qwen3_VisionTransformer")


class Rotary:
    """The rotary tables: one by length, or cosines and sines."""

    def __call__(self, length: Any) -> torch.Tensor:
        return torch.arange(int(length) * 6).reshape(int(length), 6) / 7

    def get_cos_sin(self, length: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self(length).cos(), self(length).sin()


def layer(world: World, name: str, result: Callable[[torch.Tensor], Any] = lambda x: x * 1.5 + 1) -> Callable[..., Any]:
    """A part of a model: writes down what it is called with, and makes something of the first tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        world.log.append((name, frozen(args), frozen(kwargs)))
        return result(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)))

    return call


def plain(x: Any, *_: Any, **__: Any) -> Any:
    return x


def grids(world: World, form: Form) -> Any:
    """GRID in the form that the function takes."""
    (node,) = world.source.named(form.qualname)
    annotations = [ast.unparse(arg.annotation) for arg in node.args.args if arg.arg == "grid_thw" and arg.annotation]
    return GRID if annotations and "list" in annotations[0] else torch.tensor(GRID)


def tower(world: World, form: Form, **given: Any) -> Any:
    """A vision transformer without its weights."""
    attention = SimpleNamespace(
        maybe_compute_seq_lens=lambda backend, cu_seqlens, device: None,
        compute_max_seqlen=lambda backend, cu_seqlens: int(np.diff(cu_seqlens).max()),
        maybe_recompute_cu_seqlens=lambda backend, cu_seqlens, *args, **kwargs: torch.from_numpy(cu_seqlens),
    )
    world.give(MMEncoderAttention=attention)
    merged = TOKENS // MERGE**2
    return world.owner(
        form.qualname,
        **{
            "spatial_merge_size": MERGE, "spatial_merge_unit": MERGE**2, "hidden_stride": MERGE, "patch_size": 1,
            "window_size": WINDOW, "device": CPU, "dtype": torch.float32, "rotary_pos_emb": Rotary(),
            "blocks": [layer(world, "first block"), layer(world, "second block")], "fullatt_block_indexes": [1],
            "layers": [layer(world, "layer")], "deepstack_visual_indexes": [], "_rope_by_thw_cache": {},
            "patch_embed": lambda x: x + 1, "merger": lambda x: x.reshape(merged, -1), "embeddings": plain,
            "perceive": plain, "post_conv_layernorm": plain, "post_layernorm": plain, "downsample": torch.Tensor.contiguous,
            "out_hidden_size": 3, "vit_window_attn_types": [1, 0], "apply_vit_abs_pos_embed": False,
            "fast_pos_embed_interpolate": lambda grid: torch.ones(TOKENS, 3), **given,
        },
    )  # fmt: skip


@case(
    *(f"{M}.{name}.rot_pos_emb" for name in TOWERS),
    f"{M}.glm4_1v:Glm4vVisionTransformer.rot_pos_emb",
    f"{M}.qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.rot_pos_emb",
    f"{M}.ernie45_vl:Ernie4_5_VisionTransformer.rot_pos_emb",
    f"{M}.ernie45_vl:Ernie4_5_VisionTransformer.prepare_encoder_metadata",
    f"{M}.siglip2navit:Siglip2Encoder.rot_pos_emb",
    f"{M}.openpangu_vl:OpenPanguVisionTransformer.rot_pos_emb",
    f"{M}.mimo_v2_omni:MiMoVisionTransformer.rot_pos_emb",
    f"{M}.dots_ocr:DotsVisionTransformer.rot_pos_emb",
    f"{M}.cohere_compass:Cohere_VisionTransformer.rot_pos_emb",
    f"{M}.qwen2_5_vl:Qwen2_5_VisionTransformer.prepare_encoder_metadata",
    f"{M}.qwen2_vl:Qwen2VisionTransformer.prepare_encoder_metadata",
)
def of_grids(world: World, form: Form) -> Call:
    made, grid = tower(world, form), grids(world, form)
    return lambda function: function(made, grid)


@case(
    f"{M}.qwen2_5_vl:Qwen2_5_VisionTransformer.rotary_pos_emb_thw",
    f"{M}.qwen2_5_vl:Qwen2_5_VisionTransformer.get_rope_by_thw",
)
def of_one_grid(world: World, form: Form) -> Call:
    made = tower(world, form)
    return lambda function: [function(made, *grid) for grid in GRID]


@case(
    *(f"{M}.{name}.forward" for name in TOWERS),
    f"{M}.glm4_1v:Glm4vVisionTransformer.forward",
    f"{M}.mimo_v2_omni:MiMoVisionTransformer.forward",
)
def encoder(world: World, form: Form) -> Call:
    made, grid, pixels = tower(world, form), grids(world, form), torch.randn(TOKENS, 3)
    return lambda function: function(made, pixels, grid)


@case(f"{M}.hunyuan_vision:HunYuanVisionTransformer.forward")
def hunyuan(world: World, form: Form) -> Call:
    made, images = tower(world, form), [[1, 8, 12], [1, 4, 4]]
    pixels = torch.randn(sum(h * w for _, h, w in images), 3)
    return lambda function: function(made, pixels, images)


@case(f"{M}.qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.forward")
def omni(world: World, form: Form) -> Call:
    made, pixels = tower(world, form, deepstack_visual_indexes=None), torch.randn(TOKENS, 3)
    return lambda function: function(made, pixels, torch.tensor(GRID))


@case(f"{M}.glm_ocr:GlmOcrVisionTransformer.forward")
def glm_ocr(world: World, form: Form) -> Call:
    tables, pixels = torch.randn(TOKENS, 4), torch.randn(TOKENS, 3)
    made = tower(world, form, rot_pos_emb=lambda grid: (tables.cos(), tables.sin(), None))
    return lambda function: function(made, pixels, GRID)


@case(f"{M}.kanana_v:CustomQwen2VLVE.forward")
def kanana(world: World, form: Form) -> Call:
    tables = torch.randn(TOKENS, 4)
    made = tower(world, form, rot_pos_emb=lambda grid: (tables.cos(), tables.sin()))
    world.give(BaseModelOutput=lambda **kwargs: kwargs)
    pixels = torch.randn(TOKENS, 3)
    return lambda function: function(made, pixels, GRID, return_dict=True)


@case(
    f"{M}.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_image_embeds_evs",
    f"{M}.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration._postprocess_video_embeds_evs",
    f"{M}.qwen3_vl:Qwen3VLForConditionalGeneration._postprocess_image_embeds_evs",
    f"{M}.qwen3_vl:Qwen3VLForConditionalGeneration._postprocess_video_embeds_evs",
    f"{M}.cohere_compass:CohereCompassForConditionalGeneration._postprocess_image_embeds_evs",
)
def efficient_video_sampling(world: World, form: Form) -> Call:
    world.give(
        compute_mrope_for_media=lambda size, merge, **_: torch.arange(int(np.prod(size)) // merge**2 * 4).view(-1, 4),
        compute_retention_mask=lambda emb, size, **_: torch.arange(len(emb)) % 3 > 0,
    )
    made = world.owner(
        form.qualname,
        visual=SimpleNamespace(spatial_merge_size=MERGE),
        is_multimodal_pruning_enabled=True,
        video_pruning_rate=0.3,
        config=SimpleNamespace(vision_config=SimpleNamespace(tokens_per_second=2)),
    )
    embeds = tuple(torch.randn(t * h * w // MERGE**2, 5) for t, h, w in GRID)
    given = {f"{what}_grid_thw": torch.tensor(GRID) for what in ("image", "video")}
    return lambda function: function(made, embeds, {**given, "second_per_grid_ts": torch.ones(2)})


@case(f"{M}.qwen3_vl:Qwen3VLForConditionalGeneration._get_expanded_positions")
def expanded_positions(world: World, form: Form) -> Call:
    video, start = 7, 5
    _, h, w = grid = [2, 4, 4]
    tokens = [start, *[video] * (h * w // MERGE**2)] * 2
    positions = torch.arange(3 * len(tokens)).reshape(3, -1)
    world.give(
        _cached_tensor=lambda value, device: torch.tensor(value, device=device),
        Qwen3VLMultiModalProcessor=SimpleNamespace(get_video_repl=lambda *args, **kwargs: SimpleNamespace(full=tokens)),
    )
    made = world.owner(
        form.qualname,
        own=(),
        config=world.pretend("config", video_token_id=video),
        visual=SimpleNamespace(spatial_merge_size=MERGE),
        get_mrope_input_positions=lambda *args, **kwargs: (positions, 0),
    )
    is_video = torch.tensor([False, *[True] * 3, False, *[True] * 3])
    kept = torch.tensor([True, True, False, True] * 2)
    arguments = {
        "device": CPU, "seq_len": len(is_video), "video_grid_thw": grid, "num_tokens_per_frame": [3, 3],
        "timestamps": [0.0, 1.0], "is_video_embed": is_video, "is_vision_start": ~is_video, "retention_mask": kept,
    }  # fmt: skip
    return lambda function: function(made, **arguments)


@case(f"{M}.transformers.multimodal:MultiModalMixin._get_image_features")
def image_features(world: World, form: Form) -> Call:
    made = world.owner(
        form.qualname,
        model=SimpleNamespace(get_image_features=layer(world, "model", lambda pixels: (pixels,))),
    )
    sizes, pixels = torch.tensor([[4, 6], [2, 2]]), torch.randn(4, 3)
    return lambda function: function(made, pixels, image_sizes=sizes, factor=2)


KEYE = f"{M}.keye:KeyeForConditionalGeneration", f"{M}.keye:BaseKeyeModule"


def siglip(world: World, form: Form) -> Any:
    """A model around SigLIP, whose encoder writes down what it is handed."""
    world.give(async_tensor_h2d=lambda data, dtype=None, device=None: torch.tensor(data, dtype=dtype))
    visual = type("Visual", (), {"dtype": torch.float32, "__call__": staticmethod(layer(world, "visual"))})()
    return world.owner(form.qualname, own=(), visual=visual, mlp_AR=lambda found, grid: [found])


@case(*(f"{kind}._process_image_input" for kind in KEYE), f"{KEYE[0]}._process_video_input")
def keye(world: World, form: Form) -> Call:
    made, pixels, grid = siglip(world, form), torch.randn(TOKENS, 3), torch.tensor(GRID)
    given = {"type": "pixel_values", "pixel_values": pixels, "image_grid_thw": grid}
    given |= {"pixel_values_videos": pixels, "video_grid_thw": grid}
    return lambda function: function(made, given)


@case(f"{KEYE[1]}._process_video_embeds")
def keye_videos(world: World, form: Form) -> Call:
    made, pixels = siglip(world, form), torch.randn(TOKENS, 3)
    return lambda function: function(made, "pixel_values_videos", torch.tensor(GRID), pixels)


@case(f"{M}.paddleocr_vl:PaddleOCRVLForConditionalGeneration.encode_image")
def paddleocr(world: World, form: Form) -> Call:
    made, pixels = siglip(world, form), torch.randn(96, 3)
    return lambda function: function(made, pixels, torch.tensor(GRID[0]))


@case(f"{M}.ernie45_vl:VariableResolutionResamplerModel.forward")
def ernie_resampler(world: World, form: Form) -> Call:
    def linear(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + 1, None

    made = world.owner(
        form.qualname,
        own=(),
        spatial_conv_size=MERGE,
        use_temporal_conv=True,
        spatial_conv_reshape=lambda x, size: x.reshape(-1, x.shape[-1] * size**2),
        **dict.fromkeys(("spatial_linear1", "spatial_linear2", "temporal_linear1", "temporal_linear2", "mlp"), linear),
        **dict.fromkeys(("spatial_gelu", "spatial_norm", "temporal_gelu", "temporal_norm", "after_norm"), plain),
    )
    x = torch.randn(TOKENS, 3)
    return lambda function: function(made, x, torch.tensor(GRID))


@case(f"{M}.idefics2_vision_model:Idefics2VisionEmbeddings.forward")
def idefics2(world: World, form: Form) -> Call:
    made = world.owner(
        form.qualname,
        patch_embedding=nn.Conv2d(3, 8, 2, 2).requires_grad_(False),
        position_embedding=nn.Embedding(16, 8).requires_grad_(False),
        patch_size=2,
        num_patches_per_side=4,
    )
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, :3, :2] = mask[1, :4, :4] = True
    pixels = torch.randn(2, 3, 8, 8)
    return lambda function: function(made, pixels, mask)


@case(f"{M}.pixtral:VisionTransformer.forward", f"{M}.pixtral:PixtralHFVisionModel.forward")
def pixtral(world: World, form: Form) -> Call:
    world.give(
        USE_XFORMERS_OPS=True,
        is_vit_use_data_parallel=lambda: True,
        position_ids_in_meshgrid=_meshgrid,
        resolve_visual_encoder_outputs=plain,
        _make_packed_sequence_metadata=lambda *args: (None, 0, None),
    )
    table = torch.randn(16, 8)

    def transformer(*args: Any, **kwargs: Any) -> Any:
        world.log.append((frozen(args), frozen(kwargs)))
        return args[0]

    made = world.owner(
        form.qualname,
        own=(),
        patch_conv=nn.Conv2d(3, 8, 2, 2).requires_grad_(False),
        ln_pre=plain,
        dtype=torch.float32,
        device=CPU,
        freqs_cis=torch.randn(4, 4, 3),
        args=SimpleNamespace(hidden_size=8),
        config=SimpleNamespace(image_size=8, patch_size=2, hidden_size=8, num_hidden_layers=1),
        input_norm=None,
        patch_positional_embedding=lambda patches, ids: table[ids],
        transformer=_Callable(transformer, layers=[world.pretend("layer")]),
    )
    images = [torch.randn(3, 4, 8), torch.randn(3, 6, 6)]
    return lambda function: function(made, images)


class _Callable:
    def __init__(self, call: Callable[..., Any], **given: Any) -> None:
        self.call = call
        vars(self).update(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _meshgrid(patches: list[torch.Tensor], max_width: int) -> torch.Tensor:
    rows = [torch.arange(p.shape[-2])[:, None] * max_width + torch.arange(p.shape[-1]) for p in patches]
    return torch.cat([row.reshape(-1) for row in rows])


@case(f"{M}.lfm2_vl:Lfm2VLMultiModalProjector.forward")
def lfm2(world: World, form: Form) -> Call:
    parts = dict.fromkeys(("linear_1", "linear_2", "act", "layer_norm"), plain)
    made = world.owner(form.qualname, factor=2, projector_use_layernorm=False, **parts)
    features = torch.randn(32, 5)
    return lambda function: function(made, features, torch.tensor([[4, 6], [2, 4]]))


@case(f"{M}.lfm2_vl:Lfm2VLForConditionalGeneration._get_lfm2vl_projector_gather_idx")
def lfm2_indices(world: World, form: Form) -> Call:
    made = world.owner(form.qualname, multi_modal_projector=SimpleNamespace(factor=2))
    return lambda function: function(made, [[4, 6], [2, 4]], CPU)


def conformer(world: World, form: Form) -> Any:
    mask = torch.tril(torch.ones(1, 9, 9, dtype=torch.bool))
    return world.owner(
        form.qualname,
        own=(),
        _streaming_mask=lambda length, *args: mask.clone(),
        chunk_size=3,
        left_chunk=1,
        compute_lens_change=plain,
        _forward_embeddings_core=lambda x, masks: (x, masks),
        _position_embedding=lambda x: (None, None),
    )


@case(f"{M}.phi4mm_audio:ConformerEncoder.calculate_hs_mask")
def phi4_mask(world: World, form: Form) -> Call:
    made, audio, mask = conformer(world, form), torch.zeros(1, 9, 4), torch.ones(1, 7, dtype=torch.bool)
    return lambda function: function(made, audio, CPU, mask)


PASSED_BY[f"{M}.phi4mm_audio:TransformerEncoderBase.forward_embeddings"] = (
    "the mask of the other layers is copied only where the device is not the CPU",
)


@case(f"{M}.phi4mm_audio:TransformerEncoderBase.forward_embeddings")
def phi4_embeddings(world: World, form: Form) -> Call:
    made, audio, mask = conformer(world, form), torch.zeros(1, 9, 4), torch.ones(1, 1, 9, dtype=torch.bool)
    return lambda function: function(made, audio, mask, 3, 1)
