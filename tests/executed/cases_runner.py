"""What the inputs of a batch, the model runner and the attention backends touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from forms import CPU, Call, Form, World, case
from pretended import frozen

INPUTS, UTILS = "vllm.multimodal.inputs", "vllm.multimodal.utils"
MOST = 64


def json_map_leaves(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: json_map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(json_map_leaves(function, item) for item in value)
    return function(value)


def nested() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(7, 12),
        "sizes": [torch.arange(3), (torch.ones(2).bool(), torch.randn(3, 2).t())],
    }


@case(f"{INPUTS}:MultiModalKwargs.as_kwargs")
def as_kwargs(world: World, form: Form) -> Call:
    world.give(json_map_leaves=json_map_leaves)
    inputs = nested()
    more = dict.fromkeys(world.takes(form.qualname, "dtype"), torch.bfloat16)
    return lambda function: function(inputs, device=CPU, **more)


@case(f"{INPUTS}:_nested_tensors_h2d")
def nested_tensors(world: World, form: Form) -> Call:
    world.give(json_map_leaves=json_map_leaves)
    inputs = {**nested(), "modality": "image", "nothing": None}
    return lambda function: function(inputs, device=CPU)


@case(f"{UTILS}:group_mm_kwargs_by_modality")
def grouped(world: World, form: Form) -> Call:
    class Items(list):  # type: ignore[type-arg]
        def get_data(self, pin_memory: bool = False) -> dict[str, Any]:
            parts = [item.data for item in self]
            return {"pixel_values": torch.cat(parts), "parts": parts, "kept": torch.ones(2)}

    world.give(
        json_map_leaves=json_map_leaves,
        **{INPUTS: SimpleNamespace(MultiModalKwargs=None, MultiModalKwargsItems=SimpleNamespace(from_seq=Items))},
    )
    items = [SimpleNamespace(modality=m, data=torch.randn(2, 3)) for m in ("image", "image", "video")]
    given = {"device": CPU, "pin_memory": True, "merge_by_field_config": True}
    given |= {name: {"kept"} for name in world.takes(form.qualname, "multimodal_cpu_fields")}
    return lambda function: list(function(items, **given))


class Buffer:
    """A buffer on the host and its copy on the device, in every form that a release has for them."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        self.cpu, self.gpu = (torch.zeros(shape, dtype=dtype) for _ in range(2))
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, number: int | None = None) -> torch.Tensor:
        return self.gpu[:number].copy_(self.cpu[:number], non_blocking=True)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.gpu[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.gpu[key] = value

    def fill_(self, value: Any) -> torch.Tensor:
        return self.gpu.fill_(value)


@case("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs")
def prepare_inputs(world: World, form: Form) -> Call:
    rope = "xdrope" if form.target.endswith("#3") else "mrope"
    scheduled = {"a": 5, "b": 2}
    long = dict.fromkeys(("positions", "slot_mapping", "req_indices", "query_pos"), torch.int64)
    names = (
        "positions", "slot_mapping", "req_indices", "query_pos", "query_start_loc", "seq_lens", "input_ids",
        "num_accepted_tokens", "num_computed_tokens", "num_scheduled_tokens", "num_draft_tokens",
        "num_decode_draft_tokens", "prev_positions", "prev_num_draft_tokens", "discard_request_indices",
        "discard_request_mask", "is_token_ids",
    )  # fmt: skip
    buffers = {name: Buffer(MOST, dtype=long.get(name, torch.int32)) for name in names}
    for kind in ("mrope", "xdrope"):
        buffers[f"{kind}_positions"] = Buffer(3 if kind == "mrope" else 4, MOST + 1, dtype=torch.int64)
    positions = buffers[f"{rope}_positions"]

    def calculated(scheduler_output: Any) -> None:
        positions.cpu.copy_(torch.arange(positions.cpu.numel()).view_as(positions.cpu))

    def of_tokens(*args: Any, **kwargs: Any) -> Any:
        world.log.append((frozen(args), frozen(kwargs)))
        return SimpleNamespace(query_start_loc=torch.tensor([0, 5, 7]))

    world.give(
        coordinate_batch_across_dp=lambda *args, **kwargs: (None, None),
        ubatch_split=lambda *args, **kwargs: (None, None),
    )
    computed = torch.tensor([3, 9], dtype=torch.int32)
    table = world.pretend(
        "block table",
        get_cpu_tensor=lambda: torch.arange(2 * 8).reshape(2, 8),
        get_device_tensor=lambda *args: torch.arange(2 * 8).reshape(2, 8),
        slot_mapping=torch.zeros(MOST, dtype=torch.int64),
    )
    made = world.owner(
        form.qualname,
        own=("_get_cumsum_and_arange",),
        **buffers,
        **{f"{name}_np": buffer.np for name, buffer in buffers.items()},
        **{f"{name}_cpu": buffer.cpu for name, buffer in buffers.items()},
        attn_metadata_builder=world.pretend("builder", reorder_batch=lambda *args: False, build=of_tokens),
        input_batch=world.pretend(
            "input batch",
            num_reqs=2, req_ids=list(scheduled), req_id_to_index={"a": 0, "b": 1}, req_prompt_embeds={},
            num_computed_tokens_cpu=computed.numpy(), num_computed_tokens_cpu_tensor=computed,
            token_ids_cpu=np.zeros((2, MOST)), token_ids_cpu_tensor=torch.arange(2 * MOST, dtype=torch.int32).reshape(2, MOST),
            num_tokens=np.array([8, 12]), num_tokens_no_spec=np.array([8, 12]), prev_req_id_to_index=None,
            num_accepted_tokens_cpu=np.ones(2, dtype=np.int32), block_table=table,
        ),
        arange_np=np.arange(MOST), device=CPU, block_size=16, max_num_blocks_per_req=8,
        uses_mrope=rope == "mrope", uses_xdrope_dim=4 * (rope == "xdrope"),
        _calc_mrope_positions=calculated, _calc_xdrope_positions=calculated,
        _compute_cascade_attn_prefix_len=lambda *args: 0,
        optimistic_seq_lens_cpu=torch.zeros(MOST, dtype=torch.int32),
        num_accepted_tokens_event=None, mamba_prev_last_scheduled_idx=None, lora_config=None,
        requests={name: SimpleNamespace(num_tokens=12, num_prompt_tokens=12) for name in scheduled},
        kv_cache_config=SimpleNamespace(kv_cache_groups=[]), get_local_padding=lambda number: 0,
    )  # fmt: skip
    output = world.pretend(
        "scheduler output",
        total_num_scheduled_tokens=7,
        num_scheduled_tokens=scheduled,
        num_common_prefix_blocks=0,
        scheduled_spec_decode_tokens={},
    )
    counts = np.array(list(scheduled.values()), dtype=np.int32)
    given = {"num_scheduled_tokens": counts, "max_num_scheduled_tokens": 5}
    given = {name: given[name] for name in world.takes(form.qualname, *given)}

    def call(function: Any) -> Any:
        result = function(made, output, **given)
        positions.cpu.fill_(-1)
        return result, positions.gpu

    return call


@case("vllm.v1.worker.gpu.buffer_utils:async_copy_to_gpu")
def to_gpu(world: World, form: Form) -> Call:
    def call(function: Any) -> Any:
        source, out = np.arange(7, dtype=np.int32), torch.zeros(7, dtype=torch.int32)
        made = [function(source, out), function(torch.arange(5), None, CPU)]
        wide = torch.arange(12).view(3, 4)
        made.append(function(wide[:, :2], None, CPU))
        source[:] = 9
        wide.fill_(9)
        return made

    return call


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


MLA = "MLACommonMetadataBuilder.build"


@case(f"vllm.v1.attention.backends.mla.common:{MLA}", f"vllm.model_executor.layers.attention.mla_attention:{MLA}")
def mla_context(world: World, form: Form) -> Call:
    query = torch.tensor([0, 5, 9, 16], dtype=torch.int32)
    computed = torch.tensor([40, 0, 70], dtype=torch.int32)

    class Prefill(SimpleNamespace):
        ChunkedContextMetadata = SimpleNamespace

    kind = SimpleNamespace(ChunkedContextMetadata=SimpleNamespace)
    common = world.pretend(
        "common metadata",
        num_reqs=3, num_actual_tokens=16, max_query_len=7, max_seq_len=77, causal=True,
        block_table_tensor=torch.zeros(3, 8, dtype=torch.int32), slot_mapping=torch.zeros(16, dtype=torch.int64),
        query_start_loc=query, query_start_loc_cpu=query, seq_lens=computed + query.diff(),
        seq_lens_cpu=computed + query.diff(), num_computed_tokens_cpu=computed,
        seq_lens_cpu_upper_bound=computed + query.diff(), dcp_local_seq_lens=None,
        compute_num_computed_tokens=lambda: computed,
    )  # fmt: skip

    def call(function: Any) -> Any:
        results = []
        for ranks in (1, 2):
            world.give(
                split_decodes_and_prefills=lambda *args, **kwargs: (0, 3, 0, 16),
                cdiv=cdiv,
                round_down=lambda a, b: a // b * b,
                get_dcp_local_seq_lens=lambda lens, *rest, ranks=ranks: lens.unsqueeze(-1).expand(-1, ranks),
                MLACommonPrefillMetadata=Prefill,
                CudnnPrefillMetadata=kind,
                FlashInferPrefillMetadata=kind,
            )
            builder = world.owner(
                form.qualname,
                own=(),
                device=CPU, reorder_batch_threshold=1, chunked_prefill_workspace_size=64,
                chunked_prefill_workspace=None, aot_schedule=True, page_size=16, dcp_world_size=ranks,
                dcp_local_block_size=16, dcp_virtual_block_size=16 * ranks, cp_kv_cache_interleave_size=16,
                prefill_metadata_cls=Prefill, metadata_cls=SimpleNamespace, q_data_type=torch.float32,
                model_config=SimpleNamespace(get_head_size=lambda: 64, dtype=torch.float32),
            )  # fmt: skip
            results.append(function(builder, 0, common))
        return results

    return call


FLASHINFER = "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder"
PAGE = 16


class Wrapper:
    """A wrapper of FlashInfer's around a kernel: its plan() reads what it is handed."""

    def __init__(self, world: World, kind: str = "BatchPrefillWithPagedKVCacheWrapper") -> None:
        self.log, self.is_a = world.log, (kind,)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.log.append((frozen(args), frozen(kwargs)))


def flashinfer_builder(world: World, form: Form, **given: Any) -> Any:
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffers = {name: Buffer(MOST) for name in names}
    world.give(fast_plan_decode=lambda wrapper, *args, **kwargs: world.log.append((frozen(args), frozen(kwargs))))
    return world.owner(
        form.qualname,
        own=("_compute_flashinfer_kv_metadata",),
        **buffers,
        **{f"{name}_np": buffer.np for name, buffer in buffers.items()},
        **{f"{name}_cpu": buffer.cpu for name, buffer in buffers.items()},
        paged_kv_indptr_buffer=torch.zeros(MOST, dtype=torch.int32),
        paged_kv_indptr_cpu_buffer=torch.zeros(MOST, dtype=torch.int32),
        **{
            "device": CPU, "page_size": PAGE, "dcp_world_size": 1, "dcp_rank": 0, "dcp_kv_cache_interleave_size": 1,
            "use_dcp": False, "reorder_batch_threshold": 1, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "has_sinks": False, "cache_dtype": "auto", "q_data_type": torch.float16,
            "q_data_type_prefill": torch.float16, "q_data_type_decode": torch.float16,
            "kv_cache_dtype": torch.float16, "sm_scale": 1.0, "window_left": -1, "logits_soft_cap": None,
            "use_trtllm_decode_attention": False, "use_dedicated_xqa": False, "enable_cuda_graph": False,
            "global_hyperparameters": SimpleNamespace(has_same_window_lefts=True, has_same_all_params=True),
            "model_config": SimpleNamespace(dtype=torch.float16),
            "attention_config": SimpleNamespace(use_trtllm_attention=False),
            "_get_prefill_wrapper": lambda *args, **kwargs: Wrapper(world),
            "_get_cascade_wrapper": lambda *args, **kwargs: Wrapper(world),
            "_get_decode_wrapper": lambda *args, **kwargs: Wrapper(world), **given,
        },
    )  # fmt: skip


@case(f"{FLASHINFER}._compute_flashinfer_kv_metadata")
def page_table(world: World, form: Form) -> Call:
    made = flashinfer_builder(world, form)
    lengths = np.array([40, 16, 70], dtype=np.int32)
    table = torch.arange(24, dtype=torch.int32).reshape(3, 8)

    def call(function: Any) -> Any:
        result = function(made, (lengths + PAGE - 1) // PAGE, lengths, table, 3, PAGE)
        for buffer in (made.paged_kv_indptr, made.paged_kv_last_page_len):
            buffer.cpu.fill_(-1)
        made.paged_kv_indptr_cpu_buffer.fill_(-1)
        return result

    return call


@case(f"{FLASHINFER}.build")
def flashinfer_build(world: World, form: Form) -> Call:
    """One decode and two prefills; the same on two ranks; and with a common prefix."""
    world.give(
        use_trtllm_attention=lambda *args, **kwargs: False,
        split_decodes_and_prefills=lambda *args, **kwargs: (1, 2, 1, 11),
        get_dcp_local_seq_lens=lambda lens, *args: lens // 2,
        FlashInferMetadata=SimpleNamespace,
        **dict.fromkeys(("FIPrefill", "FIDecode"), SimpleNamespace),
    )

    def call(function: Any) -> Any:
        results = []
        for ranks, prefix in ((1, 0), (2, 0), (1, PAGE)):
            query = torch.tensor([0, 1, 6, 12], dtype=torch.int32)
            lengths = torch.tensor([40, 30, 70], dtype=torch.int32)
            common = world.pretend(
                "common metadata",
                num_reqs=3, num_actual_tokens=12, max_query_len=6, max_seq_len=70, causal=True,
                query_start_loc=query, query_start_loc_cpu=query, seq_lens=lengths, seq_lens_cpu=lengths.clone(),
                block_table_tensor=torch.arange(24, dtype=torch.int32).reshape(3, 8),
                slot_mapping=torch.zeros(12, dtype=torch.int64),
            )  # fmt: skip
            wrapper = Wrapper(world, "BatchDCPPrefillWrapper") if ranks > 1 else Wrapper(world)
            made = flashinfer_builder(
                world,
                form,
                dcp_world_size=ranks,
                use_dcp=ranks > 1,
                _get_prefill_wrapper=lambda *args, wrapper=wrapper, **kwargs: wrapper,
            )
            results.append(function(made, prefix, common))
        return results

    return call


@case(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan",
    "flashinfer.decode:fast_decode_plan",
)
def flashinfer_plan(world: World, form: Form) -> Call:
    world.give(
        canonicalize_torch_dtype=lambda dtype: dtype,
        get_seq_lens=lambda indptr, last, page: (indptr[1:] - indptr[:-1] - 1) * page + last,
        _get_range_buf=lambda number, device: torch.arange(number, dtype=torch.int32),
    )
    made = world.owner(
        form.qualname if "." in form.qualname else "wrapper.plan",
        own=(),
        device=CPU,
        use_tensor_cores=True,
        _backend="fa2",
        _kv_lens_buffer=torch.zeros(MOST, dtype=torch.int32),
        _float_workspace_buffer=torch.zeros(8),
        _int_workspace_buffer=torch.zeros(8, dtype=torch.uint8),
        _pin_memory_int_workspace_buffer=torch.zeros(8, dtype=torch.uint8),
        _max_total_num_rows=None,
        _q_len_per_req=None,
    )
    query, pages = torch.tensor([0, 1, 6, 12]), torch.tensor([0, 3, 5, 10])
    table = [pages.int(), torch.arange(10, dtype=torch.int32), torch.tensor([8, 14, 6], dtype=torch.int32)]
    given = [query.int(), *table] if "prefill" in form.function else table
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": PAGE, "non_blocking": True}
    sizes |= dict.fromkeys(world.takes(form.qualname, "head_dim", "head_dim_qk"), 8)
    return lambda function: function(made, *given, **sizes)
