"""compat.vllm for models with latent attention: steps of an engine through the classes for it.

As in test_vllm.py the classes stand on vLLM's own where that is installed, else on stubs/vllm. What
vLLM has for GPUs alone, gathering latents and merging, is the stubs' in both."""

import importlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
import serving  # noqa: E402
from compat.engine import STUBS, engine, entry_point, rows_of  # noqa: E402
from cutlass_attn import append_kv, testing  # noqa: E402
from serving import LATENT, Batch  # noqa: E402

BLOCK = 16
HEADS = 2
SCALE = 0.07
DECODE = {"page": BLOCK, "causal": True, "heads": HEADS, **LATENT}
CASES = [
    Batch("decode", "one query of each", (1, 1, 1), (40, 1, 17), **DECODE),
    Batch("drafts", "three, as speculative decoding has", (3, 3), (40, 3), **DECODE),
    Batch("padded", "a graph's sequences", (1, 1, 1), (40, 1, 17), **DECODE, spare_entries=2),
    Batch("padded drafts", "they have queries as well", (3, 3), (40, 3), **DECODE, spare_entries=2),
    Batch("narrow", "256 + 64", (1, 1), (40, 9), **DECODE | {"head_dim": 320, "head_dim_v": 256}),
    Batch("no rotation", "512", (1, 1), (40, 9), **DECODE | {"head_dim": 512}),
]
# Decoding first, as vLLM orders a step; contexts of 0, 9 and 150 keys: three chunks of 64 rows.
MIXED = Batch("mixed", "decoding and prefill", (1, 1, 20, 5, 3), (40, 9, 20, 14, 153), **DECODE)


def stub_of(path):
    """A module of the stubs, whichever vLLM is imported."""
    spec = importlib.util.spec_from_file_location("stub", STUBS / "vllm" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["stub", "installed"])
def vllm(request):
    """The module with the classes for latent attention; `api` is vLLM's, `common` its base."""
    with engine("vllm", request.param) as compat, pytest.MonkeyPatch.context() as patch:
        compat.register()
        module = importlib.import_module("cutlass_attn.compat.vllm.mla")
        module.api = importlib.import_module("vllm.v1.attention.backend")
        module.common = importlib.import_module(
            "vllm.model_executor.layers.attention.mla_attention"
        )
        ops = stub_of("_custom_ops.py")
        for name in ("gather_and_maybe_dequant_cache", "cp_gather_and_upconvert_fp8_kv_cache"):
            patch.setattr(module.common.ops, name, getattr(ops, name))
        merging, config = stub_of("v1/attention/ops/merge_attn_states.py"), config_of(None, None)
        for name, x in {
            "merge_attn_states": merging.merge_attn_states,
            "get_num_attention_heads_from_layers": lambda *_: HEADS,
            "get_current_vllm_config": lambda: config,
            "PIN_MEMORY": False,
        }.items():
            patch.setattr(module.common, name, x, raising=False)
        if request.param == "installed":
            patch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
        yield module


def config_of(layer, dtype, kv_cache_dtype="auto", drafts=0):
    """Of vLLM's configuration what the classes read. A context's chunks have 64 rows."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8, dtype=dtype, get_head_size=lambda: 576),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, **parallel),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype=kv_cache_dtype),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, method="mtp", parallel_drafting=False
        )
        if drafts
        else None,
    )


def expand(latents):
    """kv_b_proj: head h has its keys from columns 128 h on, and its values 256 behind."""
    k, v = latents.unflatten(-1, (4, 128)).split(2, dim=-2)
    return torch.cat([k, v], dim=-1).flatten(-2), None


expand.params_dtype = torch.bfloat16


def impl_of(vllm, head_size=576, **changes):
    given = {
        "num_heads": HEADS,
        "head_size": head_size,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": vllm.AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": min(head_size, 512) if head_size != 320 else 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": expand,
        "indexer": None,
    }
    return vllm.CutlassAttnMLABackend.get_impl_cls()(**given | changes)


def builder_of(vllm, dtype, kv_cache_dtype="auto", drafts=0):
    sizes = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    prefill = vllm.CutlassAttnPrefillBackend(
        num_heads=HEADS, scale=SCALE, **sizes, vllm_config=None
    )
    layer = SimpleNamespace(q_lora_rank=None, **sizes, prefill_backend=prefill)
    spec = SimpleNamespace(block_size=BLOCK)
    config = config_of(layer, dtype, kv_cache_dtype, drafts)
    builder = vllm.CutlassAttnMLABackend.get_builder_cls()
    return builder(spec, ["layer"], config, torch.device("cpu"))


def cache_of(case, latents, like, is_fp8):
    """(blocks, BLOCK, columns), NaN where no latent is; and the block table."""
    width = max(-(-keys // BLOCK) for keys in case.seqlens_k) + 1
    order = torch.randperm(case.batch * width + 2, generator=torch.Generator().manual_seed(0))
    table = order[: case.batch * width].int().view(case.batch, width)
    if is_fp8:
        cache = torch.full((len(order), BLOCK, 656), 255, dtype=torch.uint8)
    else:
        cache = torch.full((len(order), BLOCK, latents[0].shape[-1]), torch.nan).to(like)
    for b, x in enumerate(latents):
        at = torch.arange(len(x))
        slots = table[b, at // BLOCK].long() * BLOCK + at % BLOCK
        if is_fp8:
            append_kv(x[:, None], None, cache.unsqueeze(2), None, slots, kv_format="ds_mla")
        else:
            cache.view(-1, x.shape[-1])[slots] = x
    unused = table.new_full((case.spare_entries, width), 10**6)
    return cache, torch.cat([table, unused])


def metadata_of(vllm, builder, case, table):
    """A graph pads a step with sequences without keys, whose rows of q are there all the same."""
    rows, spare = case.seqlens_q, case.spare_entries
    starts = serving.offsets(rows, spare)
    lengths = serving.int32([*case.seqlens_k, *[0] * spare])
    common = vllm.api.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=sum(rows) + spare * rows[0],
        max_query_len=max(rows),
        max_seq_len=max(case.seqlens_k),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(rows) + spare * rows[0], dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths,
    )
    return builder.build(0, common)


def latents_of(case, dtype, is_fp8=False):
    """(keys, columns) of each sequence; with is_fp8 numbers that 8 bits hold exactly."""
    found = [
        torch.from_numpy(k[0].copy()) for _, k, _ in serving.values(case, dtype, case.head_dim)
    ]
    if is_fp8:
        found = [(x * 2).round().clamp(-8, 8) for x in found]
    return [x.to(getattr(torch, dtype)) for x in found]


def judge(outs, exact, dtype):
    """Both are lists of (heads, rows, columns); exact of what reference.attention returns."""
    rows = [
        np.concatenate([x.reshape(-1, outs[0].shape[-1]) for x in parts])
        for parts in (outs, [x.exact[0] for x in exact], [x.unfused[0] for x in exact])
    ]
    accuracy = testing.judge(*rows, dtype)
    assert accuracy.ok, accuracy


def of_sequences(out, rows):
    """(heads, rows, columns) of each, in numpy."""
    return [x.transpose(0, 1).float().numpy() for x in out[: sum(rows)].split(rows)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode(vllm, case, dtype):
    like, rows = getattr(torch, dtype), case.seqlens_q
    cache, table = cache_of(case, latents_of(case, dtype), like, False)
    metadata = metadata_of(vllm, builder_of(vllm, like, drafts=rows[0] - 1), case, table)
    assert metadata.prefill is None and metadata.num_decodes == case.batch + case.spare_entries
    q = rows_of([q for q, _, _ in serving.values(case, dtype, case.head_dim)], like, spare=0)
    padding = q.new_full((case.spare_entries * rows[0], *q.shape[1:]), 3.0)
    q = torch.cat([q, padding]).split([case.head_dim_v, case.head_dim - case.head_dim_v], dim=-1)
    out, lse = impl_of(vllm, case.head_dim).forward_mqa(q, cache, metadata, None)
    assert out.shape == (len(q[0]), HEADS, case.head_dim_v) and lse.shape == out.shape[:2]
    assert (out[sum(rows) :] == 0).all() and (lse[sum(rows) :] == -torch.inf).all()
    lses = [x.T.numpy() for x in lse[: sum(rows)].split(rows)]
    serving.judge(case, dtype, case.head_dim, of_sequences(out, rows), lses)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_step_with_prefill(vllm, kv_cache_dtype):
    """What vLLM's layer does with a step: decoding over latents, prefill over expanded keys in
    parts."""
    case, dtype, rows = MIXED, "bfloat16", MIXED.seqlens_q
    like, is_fp8 = torch.bfloat16, kv_cache_dtype == "fp8_ds_mla"
    latents = latents_of(case, dtype, is_fp8)
    cache, table = cache_of(case, latents, like, is_fp8)
    metadata = metadata_of(vllm, builder_of(vllm, like, kv_cache_dtype), case, table)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 2, 3)
    assert len(metadata.prefill.chunked_context.chunks) >= 3
    impl = impl_of(vllm, kv_cache_dtype=kv_cache_dtype)
    assert not impl.supports_quant_query_input

    values = [q for q, _, _ in serving.values(case, dtype, 576)]
    q = rows_of(values[:2], like, spare=0)
    out, _ = impl.forward_mqa(q, cache, metadata, None)
    exact = [attend(x, [c] * HEADS, [c[:, :512]] * HEADS) for x, c in zip(values, latents[:2])]
    judge(of_sequences(out, rows[:2]), exact, dtype)

    values = [q[..., :192] for q in values[2:]]
    q = rows_of(values, like, spare=0)
    new = torch.cat([x[-n:] for x, n in zip(latents[2:], rows[2:])])
    out = torch.empty(len(q), HEADS * 128, dtype=like)
    impl.forward_mha(q, new[:, :512], new[:, None, 512:], cache, metadata, None, output=out)
    exact = []
    for x, c in zip(values, latents[2:]):
        k = [torch.cat([c[:, 128 * h :][:, :128], c[:, 512:]], dim=1) for h in range(HEADS)]
        v = [c[:, 256 + 128 * h :][:, :128] for h in range(HEADS)]
        exact.append(attend(x, k, v))
    judge(of_sequences(out.unflatten(1, (HEADS, 128)), rows[2:]), exact, dtype)


def attend(q, k, v):
    k, v = (torch.stack(x).float().numpy()[None] for x in (k, v))
    return reference.attention(q[None], k, v, "bfloat16", causal=True, softmax_scale=SCALE)


def test_prefill_alone(vllm):
    """Without a context, written to the caller's tensor."""
    prefill = builder_of(vllm, torch.float16)._prefill_backend
    prefill.prepare_metadata(SimpleNamespace(query_start_loc=serving.int32([0, 3, 8])))
    q, k = torch.randn(2, 8, HEADS, 192).half().unbind()
    v = torch.randn(8, HEADS, 128).half()
    out = torch.empty_like(v)
    assert prefill.supports_out()
    assert prefill.run_prefill_new_tokens(q, k, v, False, out=out) is out
    again, lse = prefill.run_prefill_new_tokens(q, k, v, True)
    assert torch.equal(again, out) and lse.shape == (HEADS, 8)
    logits = (q[3].float() * k[3].float()).sum(-1) * SCALE  # the first token of the second sequence
    assert torch.allclose(lse[:, 3], logits, atol=1e-4) and torch.equal(out[3], v[3])
    with pytest.raises(NotImplementedError, match="output_scale is given; allowed: None"):
        prefill.run_prefill_new_tokens(q, k, v, False, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 640}, "head_size=640; allowed: 320, 512, 576"),
        ({"alibi_slopes": [0.5, 0.25]}, r"alibi_slopes=\[0.5, 0.25\]; allowed: None"),
        ({"sliding_window": 128}, "sliding_window=128; allowed: None"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0; allowed: None"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'; allowed: auto, float16, bfloat16, fp8_"),
        ({"attn_type": "encoder"}, "attn_type='encoder'; allowed: decoder"),
        ({"indexer": "of DeepSeek V3.2"}, "indexer='of DeepSeek V3.2'; allowed: None"),
        ({"topk_indices_buffer": torch.zeros(1)}, "topk_indices_buffer=tensor"),
    ],
)
def test_refused_layers(vllm, changes, message):
    with pytest.raises(NotImplementedError, match=f"CUTLASS_ATTN_MLA does not support {message}"):
        impl_of(vllm, **changes)


def test_what_the_backends_say(vllm):
    backend, prefill = vllm.CutlassAttnMLABackend, vllm.CutlassAttnPrefillBackend
    assert backend.is_mla() and not backend.supports_device_cpu_query_lens_mismatch()
    assert [n for n in (128, 320, 512, 576, 640) if backend.supports_head_size(n)] == [
        320,
        512,
        576,
    ]
    ada, turing = SimpleNamespace(major=8, minor=9), SimpleNamespace(major=7, minor=5)
    for cls in (backend, prefill):
        assert cls.supports_compute_capability(ada) and not cls.supports_compute_capability(turing)
    assert not prefill.supports_compute_capability(None)
    assert backend.supports_combination(576, torch.float16, "auto") is None
    assert backend.supports_combination(576, torch.bfloat16, "fp8_ds_mla") is None
    refused = backend.supports_combination(576, torch.float16, "fp8_ds_mla")
    assert refused == (
        "head_size is 576 and dtype torch.float16; allowed with kv_cache_dtype fp8_ds_mla: 576 and "
        "torch.bfloat16"
    )
    base = importlib.import_module("vllm.v1.attention.backends.mla.prefill.base")
    for dims, fits in {
        (128, 64, 128): True,
        (192, 64, 256): True,
        (128, 60, 128): False,
        (256, 64, 128): False,
    }.items():
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert prefill.supports_mla_dimensions(base.MLADimensions(**dict(zip(names, dims)))) == fits
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    assert impl.supports_dcp and impl.can_return_lse_for_decode and impl.lse_base_on_e
    assert not impl.supports_pcp
    support = builder.get_cudagraph_support(None, None)
    assert support is vllm.api.AttentionCGSupport.UNIFORM_BATCH


def test_what_vllm_itself_refuses(vllm):
    backend, ada = vllm.CutlassAttnMLABackend, SimpleNamespace(major=8, minor=9)
    if not hasattr(backend, "validate_configuration"):
        pytest.skip("stubs/vllm has no checks of vLLM's own")
    given = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": ada,
        "attn_type": "decoder",
        "use_dcp": True,
    }
    assert backend.validate_configuration(**given) == []
    for name, reason in {
        "use_sparse": "sparse not supported",
        "has_sink": "attention sinks not supported",
        "has_sliding_window": "sliding window not supported",
        "use_pcp": "PCP not supported",
        "use_non_causal": "non-causal attention not supported",
    }.items():
        assert reason in backend.validate_configuration(**{**given, name: True})


def test_vllm_finds_the_backends(vllm):
    entry_point("vllm.general_plugins")()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum["CUTLASS_ATTN_MLA"]
    assert member.get_class() is vllm.CutlassAttnMLABackend
    assert vllm.CutlassAttnMLABackend.get_name() == member.name
    registry = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
    member = registry.MLAPrefillBackendEnum["CUTLASS_ATTN"]
    assert member.get_class() is vllm.CutlassAttnPrefillBackend
    assert vllm.CutlassAttnPrefillBackend.get_name() == member.name
