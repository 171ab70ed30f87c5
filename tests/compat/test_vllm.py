"""compat.vllm: steps of an engine through the backend's classes, against the oracle.

The classes stand on vLLM's own where that is installed, else on stubs/vllm."""

import dataclasses
import importlib
import inspect
import logging
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import serving  # noqa: E402
from compat.engine import engine, entry_point, rows_of, stub  # noqa: E402
from serving import Batch  # noqa: E402

BLOCK = 16
# vLLM's names of layouts of (layers, blocks, heads, tokens, columns): the order in memory.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
MIXED = {"seqlens_q": (1, 33, 1, 7, 16), "seqlens_k": (40, 33, 1, 20, 80)}
CASES = [
    Batch("decode", "one query of each", (1, 1, 1, 1), (1, 17, 40, 64), BLOCK, causal=True),
    Batch("chunks", "prompts and their later parts", (16, 5, 33), (16, 37, 64), BLOCK, causal=True),
    Batch("mixed", "prefill and decoding in a step", **MIXED, page=BLOCK, causal=True),
    Batch("padded", "a graph's sequences", **MIXED, page=BLOCK, causal=True, spare_entries=3),
    Batch("mha", "no GQA", **MIXED, page=BLOCK, causal=True, heads_kv=4),
    Batch("mqa", "a stride of no meaning", **MIXED, page=BLOCK, causal=True, heads_kv=1),
    Batch("window", "Mistral", **MIXED, page=BLOCK, causal=True, window=(8, 0)),
    Batch("softcap", "Gemma 2", **MIXED, page=BLOCK, causal=True, softcap=2.0, softmax_scale=0.3),
    Batch("sinks", "gpt-oss", **MIXED, page=BLOCK, causal=True, sinks=True, window=(15, 0)),
    Batch("alibi", "BLOOM", **MIXED, page=BLOCK, causal=True, alibi="h"),
    Batch("fp8", "a scale for a layer", **MIXED, page=BLOCK, causal=True, fp8=True, scales="one"),
    Batch("fp8 heads", "for a head", **MIXED, page=BLOCK, causal=True, fp8=True, scales="heads"),
    Batch("two-sided", "drafts of a block", **MIXED, page=BLOCK),
]
ENCODER = Batch("encoder", "keys are the rows of the step", *[(5, 0, 40)] * 2, sinks=True)


@pytest.fixture(scope="module", params=["stub", "installed"])
def vllm(request):
    """The backend's module, with `api`, vLLM's own."""
    with engine("vllm", request.param) as compat:
        compat.register()
        compat.register()
        module = importlib.import_module("cutlass_attn.compat.vllm.backend")
        module.api = importlib.import_module("vllm.v1.attention.backend")
        yield module


def cache_of(case, layout, head_dim, dtype, blocks):
    """The view of one layer, (blocks, Hkv, tokens, 2 D), NaN all over."""
    shape = (3, blocks, case.heads_kv, BLOCK, 2 * head_dim)
    order = LAYOUTS[layout]
    kept = torch.full([shape[i] for i in order], torch.nan, dtype=dtype)
    return kept.permute(*np.argsort(order).tolist())[1]


def step(case, table, rows, until):
    """The batch of a step, as vLLM describes it: rows new keys of each sequence, the last `until`.

    Tables have blocks of nobody behind those of a sequence, and a graph's padding its rows: it
    belongs to sequences of no queries, and to no slot."""
    spare, padding = case.spare_entries, 5 * bool(case.spare_entries)
    slots = [
        table[b, j // BLOCK] * BLOCK + j % BLOCK
        for b, (new, keys) in enumerate(zip(rows, until))
        for j in range(keys - new, keys)
    ]
    slots = torch.tensor([*map(int, slots), *[-1] * padding])
    starts = serving.offsets(rows, spare)
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": serving.int32([*until, *[0] * spare]),
        "num_reqs": len(starts) - 1,
        "num_actual_tokens": len(slots),
        "max_query_len": max(rows),
        "max_seq_len": max(until),
        "block_table_tensor": torch.cat([table, table.new_full((spare, table.shape[1]), 10**6)]),
        "slot_mapping": slots,
        "causal": case.causal,
    }


def impl_of(vllm, case, head_dim, **more):
    options = serving.arrays(case)
    window = None if case.window is None else case.window[0] + 1
    extra = {}
    if case.sinks:
        extra["sinks"] = torch.from_numpy(options["sinks"].copy())
    slopes = options.get("alibi_slopes")
    impl_cls = vllm.CutlassAttnBackend.get_impl_cls()
    scale = head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    impl = impl_cls(
        case.heads,
        head_dim,
        scale,
        case.heads_kv,
        None if slopes is None else slopes.tolist(),
        window,
        "fp8" if case.fp8 else "auto",
        case.softcap or None,
        more.pop("attn_type", vllm.AttentionType.DECODER),
        None,
        **extra,
    )
    impl.process_weights_after_loading(torch.float16)
    return impl


def layer_of(case):
    options = serving.arrays(case)
    scales = (torch.tensor(1.0), torch.tensor(1.0))
    if case.scales:
        scales = [torch.from_numpy(options[name].copy()) for name in ("k_scale", "v_scale")]
    if case.scales == "one":  # vLLM's own has no dimension
        scales = [x[0] for x in scales]
    return SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])


def builder_of(vllm):
    return vllm.CutlassAttnBackend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))


def results(case, out):
    """(H, S, D) of each sequence."""
    rows = out[: sum(case.seqlens_q)].split(case.seqlens_q)
    return [x.transpose(0, 1).float().numpy() for x in rows]


def run_steps(vllm, case, head_dim, dtype, layout, drop_new=False):
    """Writes the earlier keys in one step and runs the last one; its result."""
    like = getattr(torch, dtype)
    parts = serving.values(case, dtype, head_dim)
    factors = serving.arrays(case)
    k_scale, v_scale = (
        np.broadcast_to(factors.get(name, np.float32(1)), case.heads_kv)[:, None, None]
        for name in ("k_scale", "v_scale")
    )
    width = max(-(-keys // BLOCK) for keys in case.seqlens_k) + 2
    blocks = case.batch * width + 3
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int()
    table = order[: case.batch * width].view(case.batch, width)
    stored = torch.uint8 if case.fp8 else like
    if case.fp8:  # NaN in e4m3
        cache = cache_of(case, layout, head_dim, torch.float32, blocks).to(torch.float8_e4m3fn)
        cache = cache.view(torch.uint8)
    else:
        cache = cache_of(case, layout, head_dim, stored, blocks)
    impl, layer, builder = impl_of(vllm, case, head_dim), layer_of(case), builder_of(vllm)

    def new(rows, until):
        k, v = (
            rows_of([x[i][:, n - r : n] * s for x, r, n in zip(parts, rows, until)], like)
            for i, s in ((1, k_scale), (2, v_scale))
        )
        common = vllm.api.CommonAttentionMetadata(**step(case, table, rows, until))
        metadata = builder.build(0, common)
        impl.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
        return k, v, metadata

    before = [keys - rows for rows, keys in zip(case.seqlens_q, case.seqlens_k)]
    new(before, before)
    k, v, metadata = new(case.seqlens_q, case.seqlens_k)
    q = rows_of([x[0] for x in parts], like, spare=9)
    out = torch.full((q.shape[0], case.heads, head_dim), 7.0, dtype=like)
    given = (None, None) if drop_new else (k, v)
    assert impl.forward(layer, q, *given, cache, metadata, output=out) is out
    assert (out[metadata.num_actual_tokens :] == 7).all()
    return results(case, out)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps(vllm, case, dtype):
    outs = run_steps(vllm, case, 64, dtype, "LBHNC")
    serving.judge(case, dtype, 64, outs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mixed", "mqa", "fp8"])
def test_layouts_of_the_cache(vllm, layout, name):
    (case,) = (x for x in CASES if x.name == name)
    serving.judge(case, "float16", 32, run_steps(vllm, case, 32, "float16", layout))


def test_keys_that_another_operation_has_written(vllm):
    case = CASES[2]
    serving.judge(case, "float16", 64, run_steps(vllm, case, 64, "float16", "LBNHC", drop_new=True))


@pytest.mark.parametrize("attn_type", ["ENCODER", "ENCODER_ONLY"])
def test_encoder_has_no_cache(vllm, attn_type):
    case = ENCODER
    if attn_type == "ENCODER_ONLY":
        case = dataclasses.replace(case, window=(3, 3))
    impl = impl_of(vllm, case, 64, attn_type=getattr(vllm.AttentionType, attn_type))
    parts = serving.values(case, "float16", 64)
    q, k, v = (rows_of([x[i] for x in parts], torch.float16) for i in range(3))
    table = torch.zeros(3, 3, dtype=torch.int32)
    common = step(dataclasses.replace(case, causal=True), table, case.seqlens_q, case.seqlens_k)
    metadata = builder_of(vllm).build(0, vllm.api.CommonAttentionMetadata(**common))
    impl.do_kv_cache_update(layer_of(case), k, v, torch.zeros(0), metadata.slot_mapping)
    out = torch.zeros_like(q)
    impl.forward(layer_of(case), q, k, v, torch.zeros(0), metadata, output=out)
    outs = [
        x.transpose(0, 1).float().numpy() for x in out[: sum(case.seqlens_q)].split(case.seqlens_q)
    ]
    serving.judge(case, "float16", 64, outs)


def test_cross_attention(vllm):
    """Keys are those of an encoder; with fewer of them than queries, too."""
    case = Batch("cross", "", (9, 1), (4, 30), page=BLOCK)
    parts = serving.values(case, "float16", 64)
    q, k, v = (rows_of([x[i] for x in parts], torch.float16) for i in range(3))
    table = torch.tensor([[3, 9], [0, 2]], dtype=torch.int32)
    rows = step(case, table, case.seqlens_k, case.seqlens_k)  # slots of the keys
    common = {**rows, "query_start_loc": serving.offsets(case.seqlens_q), "num_actual_tokens": 10}
    metadata = builder_of(vllm).build(0, vllm.api.CommonAttentionMetadata(**common))
    impl = impl_of(vllm, case, 64, attn_type=vllm.AttentionType.ENCODER_DECODER)
    cache = cache_of(case, "LBHNC", 64, torch.float16, 5)
    impl.do_kv_cache_update(layer_of(case), k, v, cache, metadata.slot_mapping)
    out = torch.zeros_like(q)
    impl.forward(layer_of(case), q, k, v, cache, metadata, output=out)
    serving.judge(case, "float16", 64, results(case, out))


def test_profiling_run_has_no_metadata(vllm):
    out = torch.full((5, 4, 64), torch.nan)
    impl_of(vllm, CASES[0], 64).forward(None, out, out, out, torch.zeros(0), None, output=out)
    assert (out == 0).all()


def test_metadata_are_views(vllm):
    """No tensor is made, so a graph reads what vLLM writes to its buffers before a replay."""
    common = vllm.api.CommonAttentionMetadata(
        **step(CASES[2], torch.zeros(5, 9, dtype=torch.int32), *MIXED.values())
    )
    builder = builder_of(vllm)
    for built in (
        builder.build(0, common),
        builder.build_for_cudagraph_capture(common),
        builder.build_for_drafting(common, 0),
    ):
        assert built.seq_lens is common.seq_lens
        assert built.block_table is common.block_table_tensor
        assert built.query_start_loc is common.query_start_loc
    assert builder.get_cudagraph_support(None, None) is vllm.api.AttentionCGSupport.ALWAYS
    built.of_a_layer = 5
    other = builder.update_block_table(built, built.block_table + 1, built.slot_mapping + 2)
    assert other.of_a_layer == 5
    assert other.block_table[0, 0] == 1 and built.block_table[0, 0] == 0
    assert other.slot_mapping[0] == built.slot_mapping[0] + 2
    builder.update_draft_decode_metadata(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"common_prefix_len": 32}, "no cascade attention: common_prefix_len is 32; allowed: 0"),
        ({"causal": torch.ones(5, dtype=torch.bool)}, "causal is a Tensor; allowed: True, False"),
    ],
)
def test_refused_batches(vllm, changes, message):
    rows = step(CASES[2], torch.zeros(5, 9, dtype=torch.int32), *MIXED.values())
    prefix = changes.get("common_prefix_len", 0)
    rows |= {name: x for name, x in changes.items() if name == "causal"}
    with pytest.raises(NotImplementedError, match=message):
        builder_of(vllm).build(prefix, vllm.api.CommonAttentionMetadata(**rows))


def test_refused_calls(vllm):
    impl, x = impl_of(vllm, CASES[0], 64), torch.zeros(1, 4, 64)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name} is given; allowed: None"):
            impl.forward(None, x, x, x, x, None, output=x, **{name: x})
    with pytest.raises(NotImplementedError, match="'int8'; allowed: auto, float16, bfloat16, fp8"):
        vllm.CutlassAttnImpl(4, 64, 1.0, kv_cache_dtype="int8")


def test_sinks_of_the_weights_dtype(vllm):
    """They become float32 once they are loaded; before, the call is refused, not run without."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.bfloat16)
    impl = vllm.CutlassAttnImpl(4, 64, 1.0, attn_type="encoder", sinks=sinks)
    q = torch.randn(3, 4, 64, dtype=torch.bfloat16)
    metadata = builder_of(vllm).build(
        0,
        vllm.api.CommonAttentionMetadata(
            **step(Batch("", "", (3,), (3,)), torch.zeros(1, 1, dtype=torch.int32), (3,), (3,))
        ),
    )
    with pytest.raises(ValueError, match="sinks"):
        impl.forward(None, q, q, q, q, metadata, output=torch.empty_like(q))
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.options["sinks"].dtype == torch.float32
    impl.forward(None, q, q, q, q, metadata, output=torch.empty_like(q))


def test_what_the_backend_says_of_calls(vllm):
    backend = vllm.CutlassAttnBackend
    assert [n for n in (60, 64, 80, 256, 264) if backend.supports_head_size(n)] == [64, 80, 256]
    capability = SimpleNamespace(major=8, minor=9)
    refused = backend.supports_combination(72, torch.float16, "fp8")
    assert refused == "head_size is 72; allowed with an fp8 cache: multiples of 16"
    assert backend.supports_combination(72, torch.float16, "auto") is None
    assert backend.supports_compute_capability(capability)
    assert not backend.supports_compute_capability(SimpleNamespace(major=7, minor=5))


def test_what_vllm_itself_refuses(vllm):
    backend, capability = vllm.CutlassAttnBackend, SimpleNamespace(major=8, minor=9)
    if not hasattr(backend, "validate_configuration"):
        pytest.skip("stubs/vllm has no checks of vLLM's own")
    given = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": True,
        "device_capability": capability,
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_non_causal": True,
    }
    assert backend.validate_configuration(**given) == []
    for name, reason in {
        "use_mla": "MLA not supported",
        "use_batch_invariant": "batch invariance not supported",
        "use_dcp": "DCP not supported",
        "use_mm_prefix": "partial multimodal token full attention not supported",
    }.items():
        assert backend.validate_configuration(**{**given, name: True}) == [reason]


def test_vllm_finds_the_backend(vllm):
    entry_point("vllm.general_plugins")()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum["CUTLASS_ATTN"]
    assert member.get_class() is vllm.CutlassAttnBackend
    assert vllm.CutlassAttnBackend.get_name() == member.name
    assert vllm.CutlassAttnBackend.get_impl_cls() is vllm.CutlassAttnImpl


def test_other_versions(monkeypatch, caplog):
    with engine("vllm", "stub") as compat:
        import vllm as package

        monkeypatch.setattr(package, "__version__", "0.34.0rc1")
        message = "supports vllm from 0.33 to before 0.34; 0.34.0rc1 is installed"
        with pytest.raises(RuntimeError, match=message):
            compat.register()
        with caplog.at_level(logging.WARNING):
            compat.plugin()  # vLLM would stop, whichever backend it runs
        assert message in caplog.text
        with pytest.warns(UserWarning, match=message):
            compat.register(any_version=True)


def parameters(function):
    """Of a function of a class or a module, and whether they have a default."""
    given = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    return [(x.name, x.default is x.empty) for x in given if x.name not in ("self", "cls")]


def test_stub_has_the_signatures_of_vllm():
    """Each function and class of the stub is vLLM's; a dataclass may lack fields."""
    pytest.importorskip("vllm")
    names = [
        "vllm._custom_ops",
        "vllm.model_executor.layers.attention.mla_attention",
        "vllm.v1.attention.backend",
        "vllm.v1.attention.backends.mla.prefill.base",
        "vllm.v1.attention.backends.mla.prefill.registry",
        "vllm.v1.attention.backends.registry",
        "vllm.v1.attention.ops.merge_attn_states",
    ]

    def modules():
        return [importlib.import_module(name) for name in names]

    compared = []

    def compare(ours, theirs):
        for name, x in vars(ours).items():
            is_own = getattr(x, "__module__", None) == getattr(ours, "__name__", None)
            if inspect.isclass(ours) or (is_own and not name.startswith("_")):
                x = getattr(x, "__func__", x)
                y = getattr(theirs, name, None)
                if inspect.isfunction(x):
                    generated = dataclasses.is_dataclass(ours) and name.startswith("__")
                    assert generated or parameters(x) == parameters(y), (theirs, name)
                    compared.append(name)
                elif inspect.isclass(x):
                    compare(x, y)
        if dataclasses.is_dataclass(ours):
            ours, theirs = ([x.name for x in dataclasses.fields(cls)] for cls in (ours, theirs))
            assert ours == [name for name in theirs if name in ours]

    their_modules = modules()
    with stub("vllm"):
        for ours, theirs in zip(modules(), their_modules):
            compare(ours, theirs)
    assert len(compared) > 60
