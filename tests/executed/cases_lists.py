"""What the functions that make tensors of lists touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from cases_models import M, _Callable, layer
from forms import CPU, Call, Form, World, case
from torch import nn

# The first one imports half of torch, which would fail where parts of torch are pretended.
torch.nested.nested_tensor([torch.ones(1, 2)], layout=torch.jagged)

BACKENDS = "vllm.v1.attention.backends"
RANGES = {0: [(2, 6)], 2: [(1, 4), (8, 9)], 3: []}
SHAPES = [[4, 6], [2, 4]]  # rows and columns of patches of two tiles


@case(f"{BACKENDS}.triton_attn:TritonAttentionMetadata.mm_prefix_range_tensor")
def image_ranges(world: World, form: Form) -> Call:
    made = world.owner(form.qualname, mm_prefix_range=RANGES, seq_lens=torch.zeros(4))
    return lambda function: function(made)


@case(f"{BACKENDS}.triton_attn:TritonAttentionMetadata.compute_mm_prefix_range_tensor")
def image_ranges_of_a_step(world: World, form: Form) -> Call:
    return lambda function: function(RANGES, 4, CPU)


@case(f"{BACKENDS}.flash_attn:FlashAttentionMetadataBuilder.build")
def cascade(world: World, form: Form) -> Call:
    world.give(FlashAttentionMetadata=SimpleNamespace)
    query = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
    lengths = torch.tensor([40, 36, 51], dtype=torch.int32)
    common = world.pretend(
        "common metadata",
        num_reqs=3, num_actual_tokens=8, max_query_len=5, max_seq_len=51, causal=True, query_start_loc=query,
        seq_lens=lengths, seq_lens_cpu=lengths.clone(), block_table_tensor=torch.zeros(3, 8, dtype=torch.int32),
        slot_mapping=torch.zeros(8, dtype=torch.int64), mm_req_doc_ranges=None, rswa_prefix_lens=None,
    )  # fmt: skip
    made = world.owner(
        form.qualname,
        own=(),
        device=CPU,
        dcp_world_size=1,
        aot_sliding_window=(-1, -1),
        rswa_window=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_cache_spec=SimpleNamespace(sliding_window=None),
    )
    return lambda function: function(made, 32, common)


@case(f"{BACKENDS}.utils:get_dcp_local_seq_lens")
def of_this_rank(world: World, form: Form) -> Call:
    lengths = torch.tensor([40, 7, 70])
    return lambda function: function(lengths, 2, 1, 4)


@case("vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs")
def given_tokens(world: World, form: Form) -> Call:
    world.give(
        compute_token_logprobs=lambda logits, ids: logits.log_softmax(-1).gather(-1, ids),
        LogprobsTensors=SimpleNamespace,
    )
    made, logits, sampled = world.owner(form.qualname), torch.randn(3, 20), torch.tensor([4, 9, 1])
    return lambda function: function(made, logits, {0: [3, 15, 7], 2: [11]}, sampled)


@case(f"{M}.radio:RadioInternVisionModel.inter_image_mask_metadata")
def images(world: World, form: Form) -> Call:
    world.give(MaskMetadata=SimpleNamespace)
    made = world.owner(form.qualname, patch_generator=SimpleNamespace(patch_size=16, num_skip=5))
    return lambda function: function(made, [(64, 32), (32, 96)], CPU)


@case(f"{M}.radio:RadioInternVisionModel._inter_image_mask_metadata_from_seq_lens")
def lengths_of_images(world: World, form: Form) -> Call:
    world.give(MaskMetadata=SimpleNamespace)
    made = world.owner(form.qualname)
    return lambda function: function(made, [13, 17], CPU)


@case(f"{M}.lfm2_vl:Lfm2VLForConditionalGeneration.image_pixels_to_features")
def tiles(world: World, form: Form) -> Call:
    weights = SimpleNamespace(embeddings=SimpleNamespace(patch_embedding=SimpleNamespace(weight=torch.zeros(1))))

    def projected(vision_features_packed: torch.Tensor, spatial_shapes: Any) -> torch.Tensor:
        return vision_features_packed.reshape(-1, 4 * vision_features_packed.shape[-1])

    made = world.owner(
        form.qualname,
        vision_tower=_Callable(layer(world, "tower"), vision_model=weights),
        multi_modal_projector=_Callable(projected, factor=2),
    )
    pixels = torch.randn(2, 24, 3)
    return lambda function: function(made, pixels, torch.tensor(SHAPES))


@case(f"{M}.lfm2_vl:Lfm2VLForConditionalGeneration._get_lfm2vl_cu_seqlens")
def lengths_of_tiles(world: World, form: Form) -> Call:
    made = world.owner(form.qualname)
    return lambda function: function(made, SHAPES, CPU)


@case(f"{M}.glm4_1v:Glm4vVisionEmbeddings.forward")
def positions(world: World, form: Form) -> Call:
    """Two images, and a video of two frames."""
    made = world.owner(form.qualname, position_embedding=nn.Embedding(16, 8).requires_grad_(False))
    tokens, coordinates = torch.randn(12, 8), torch.stack([torch.arange(12) // 3 % 2, torch.arange(12) % 3], dim=-1)

    def call(function: Any) -> Any:
        return [
            function(made, tokens, lengths, torch.tensor(shapes, dtype=torch.int32), *coordinates.unbind(-1))
            for lengths, shapes in (([6, 6], [[1, 2, 3], [1, 3, 2]]), ([6, 6], [[2, 2, 3]]))
        ]

    return call


@case(f"{M}.glm4_1v:Glm4vVisionTransformer.pos_embeds_interpolate")
def positions_of_images(world: World, form: Form) -> Call:
    embeddings = _Callable(
        lambda embeddings, lengths, image_shapes, **_: embeddings + image_shapes.sum(0).repeat(2)[:4],
        position_embedding=SimpleNamespace(weight=torch.zeros(1)),
    )
    made = world.owner(
        form.qualname, own=(), embeddings=embeddings, dtype=torch.float32, spatial_merge_size=2, hidden_size=4
    )
    return lambda function: function(made, [[1, 8, 12], [2, 4, 4]])
