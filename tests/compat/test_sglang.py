"""compat.sglang: batches of an engine through the backend, against the oracle.

The backend stands on SGLang's own classes where that is installed, else on stubs/sglang. The pools
are this test's: those of SGLang write by kernels for GPUs."""

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

DECODE = {"seqlens_q": (1, 1, 1, 1), "seqlens_k": (1, 17, 40, 64)}
CHUNKS = {"seqlens_q": (16, 5, 33), "seqlens_k": (16, 37, 64)}
MIXED = {"seqlens_q": (1, 33, 1, 7, 16), "seqlens_k": (40, 33, 1, 20, 80)}
CASES = [
    Batch("decode", "one query of each", **DECODE, page=16, causal=True),
    Batch("decode, page 1", "SGLang's default", **DECODE, page=1, causal=True),
    Batch("chunks", "prompts and their later parts", **CHUNKS, page=16, causal=True),
    Batch("mixed", "prefill and decoding in a batch", **MIXED, page=64, causal=True),
    Batch("mixed, page 1", "SGLang's default", **MIXED, page=1, causal=True),
    Batch("mha", "no GQA", **MIXED, page=16, causal=True, heads_kv=4),
    Batch("mqa", "one KV head", **MIXED, page=16, causal=True, heads_kv=1),
    Batch("narrow", "V of fewer columns", **MIXED, page=16, causal=True, head_dim_v=32),
    Batch("window", "Mistral", **MIXED, page=16, causal=True, window=(7, 0)),
    Batch("softcap", "Gemma 2", **MIXED, page=16, causal=True, softcap=2.0, softmax_scale=0.3),
    Batch("sinks", "gpt-oss", **DECODE, page=16, causal=True, sinks=True, window=(15, 0)),
    Batch("chunked", "Llama 4", **MIXED, page=16, causal=True, attention_chunk=9),
    Batch("fp8", "without scales", **MIXED, page=16, causal=True, fp8=True),
    Batch("fp8 scales", "of a checkpoint", **MIXED, page=16, causal=True, fp8=True, scales="one"),
    Batch("encoder", "all see all", *[(5, 1, 40)] * 2, page=16),
    Batch("encoder window", "on both sides", *[(5, 1, 40)] * 2, page=16, window=(3, 3)),
]


@pytest.fixture(scope="module", params=["stub", "installed"])
def sglang(request):
    """The backend's module."""
    with engine("sglang", request.param) as compat:
        compat.register()
        compat.register()
        yield importlib.import_module("cutlass_attn.compat.sglang.backend")


class Mode:
    """A ForwardMode."""

    def __init__(self, name):
        self.name = name

    def is_idle(self):
        return self.name == "IDLE"

    def is_decode(self):
        return self.name == "DECODE"

    def is_decode_or_idle(self):
        return self.name in ("DECODE", "IDLE")

    def is_mixed(self):
        return self.name == "MIXED"


class Pool:
    """Keys and values of one layer, (slots, Hkv, D), NaN where nothing was written."""

    def __init__(self, slots, case, head_dim, dtype):
        dims = head_dim, case.head_dim_v or head_dim
        self.buffers = [torch.full((slots, case.heads_kv, n), torch.nan).to(dtype) for n in dims]

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for buffer, new, scale in zip(self.buffers, (cache_k, cache_v), (k_scale, v_scale)):
            factor = scale if scale is not None and buffer.dtype != new.dtype else 1.0
            stored = (new.float() / factor).to(buffer.dtype)
            loc = self.slots_of(loc_info)
            buffer.view(torch.uint8)[loc] = stored[: len(loc)].contiguous().view(torch.uint8)

    def slots_of(self, loc_info):
        return loc_info.loc


def window_pool(sglang, *shape):
    """A pool with slots of its own for layers that have a window."""

    class WindowPool(Pool, sglang.SWAKVPool):
        swa_layer_nums = 1

        def __init__(self, *shape):
            Pool.__init__(self, *shape)
            page, pages = shape[1].page, shape[0] // shape[1].page
            moved = torch.arange(pages).flip(0)[:, None] * page + torch.arange(page)
            self.full_to_swa_index_mapping = moved.flatten()

        def slots_of(self, loc_info):
            return loc_info.swa_loc

    return WindowPool(*shape)


def runner_of(case, pool, table, **changes):
    dtype = changes.pop("kv_cache_dtype", pool.buffers[0].dtype if pool else torch.float16)
    runner = {
        "token_to_kv_pool": pool,
        "kv_cache_dtype": dtype,
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
        "server_args": SimpleNamespace(dcp_size=1),
        "page_size": case.page,
        "attention_chunk_size": case.attention_chunk,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
    }
    return SimpleNamespace(**runner | changes)


def layer_of(sglang, case, head_dim, **changes):
    scales = [serving.arrays(case).get(name) for name in ("k_scale", "v_scale")]
    scales = [None if x is None else torch.tensor(x[0]) for x in scales]
    layer = {
        "layer_id": 0,
        "tp_q_head_num": case.heads,
        "tp_k_head_num": case.heads_kv,
        "qk_head_dim": head_dim,
        "v_head_dim": case.head_dim_v or head_dim,
        "scaling": head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale,
        "logit_cap": case.softcap,
        "sliding_window_size": -1 if case.window is None else case.window[0],
        "is_cross_attention": False,
        "attn_type": sglang.AttentionType["DECODER" if case.causal else "ENCODER_ONLY"],
        "use_irope": case.attention_chunk is not None,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**layer | changes)


def table_of(case):
    """req_to_token, (requests, context), and the requests of the sequences. Entries that nobody
    has written, and those of other requests, name no slot of a sequence."""
    pages = [-(-keys // case.page) for keys in case.seqlens_k]
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(0))
    order = order[order != 0].int()  # page 0 takes the writes of padding
    table = torch.zeros(len(pages) + 3, max(case.seqlens_k) + 5, dtype=torch.int32)
    requests = torch.randperm(len(table), generator=torch.Generator().manual_seed(1))
    for row, mine, keys in zip(requests, order.split(pages), case.seqlens_k):
        slots = (mine[:, None] * case.page + torch.arange(case.page)).flatten()
        table[row, :keys] = slots[:keys]
    return table, requests[: len(pages)], (sum(pages) + 1) * case.page


def batch_of(case, table, requests, rows, until, mode):
    slots = [table[r, n - new : n] for r, new, n in zip(requests, rows, until)]
    extend = torch.tensor(rows) if mode != "DECODE" else None
    return SimpleNamespace(
        forward_mode=Mode(mode),
        batch_size=len(rows),
        req_pool_indices=requests,
        seq_lens=torch.tensor(until),
        extend_seq_lens=extend,
        out_cache_loc=torch.cat(slots).long(),
        out_cache_loc_is_physical=False,
        encoder_lens=None,
    )


def run(sglang, case, head_dim, dtype, pool_of=lambda _, *shape: Pool(*shape), graph=False):
    """Writes the earlier keys as one batch and runs the last; what each sequence gets."""
    like = getattr(torch, dtype)
    table, requests, slots = table_of(case)
    stored = torch.float8_e4m3fn if case.fp8 else like
    pool = pool_of(sglang, slots, case, head_dim, stored)
    backend = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    backend = backend.ATTENTION_BACKENDS["cutlass_attn"](runner_of(case, pool, table))
    layer = layer_of(sglang, case, head_dim)
    parts = serving.values(case, dtype, head_dim)
    factors = [layer.k_scale or 1.0, layer.v_scale or 1.0]
    options = {}
    if case.sinks:
        options["sinks"] = torch.from_numpy(serving.arrays(case)["sinks"].copy())

    def step(rows, until, mode, queries, in_graph=False):
        q = rows_of(queries, like)
        k, v = (
            rows_of([x[i][:, n - r : n] for x, r, n in zip(parts, rows, until)], like) * factor
            for i, factor in zip((1, 2), factors)
        )
        batch = batch_of(case, table, requests, rows, until, mode)
        if in_graph:
            backend.init_cuda_graph_state(8, 8)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        return backend.forward(q.flatten(1), k, v, layer, batch, **options)

    before = [n - r for r, n in zip(case.seqlens_q, case.seqlens_k)]
    if any(before):
        nothing = [np.zeros((case.heads, n, head_dim), np.float32) for n in before]
        step(before, before, "EXTEND", nothing)
    mode = "MIXED" if 1 in case.seqlens_q else "EXTEND"
    mode = "DECODE" if set(case.seqlens_q) == {1} else mode
    out = step(case.seqlens_q, case.seqlens_k, mode, [x[0] for x in parts], graph)
    assert out.shape[1] == case.heads * (case.head_dim_v or head_dim)
    rows = out.unflatten(1, (case.heads, -1))[: sum(case.seqlens_q)].split(case.seqlens_q)
    return [x.transpose(0, 1).float().numpy() for x in rows]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_batches(sglang, case, dtype):
    serving.judge(case, dtype, 64, run(sglang, case, 64, dtype))


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_window_pool(sglang, name):
    """Layers with a window have slots of their own."""
    (case,) = (x for x in CASES if x.name == name)
    serving.judge(case, "float16", 64, run(sglang, case, 64, "float16", window_pool))


def test_in_a_graph(sglang):
    """What a capture calls, and nothing of it on the host."""
    case = CASES[0]
    serving.judge(case, "float16", 64, run(sglang, case, 64, "float16", graph=True))


def test_graph_of_prefill_is_refused(sglang):
    table, requests, _ = table_of(CASES[2])
    backend = sglang.CutlassAttnBackend(runner_of(CASES[2], None, table))
    batch = batch_of(CASES[2], table, requests, *CHUNKS.values(), "EXTEND")
    with pytest.raises(NotImplementedError, match="graph of EXTEND; allowed: DECODE, IDLE"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert not backend.needs_cpu_seq_lens


def test_idle_batch(sglang):
    table, requests, _ = table_of(CASES[0])
    backend = sglang.CutlassAttnBackend(runner_of(CASES[0], None, table))
    batch = batch_of(CASES[0], table, requests[:1], (1,), (1,), "DECODE")
    batch.forward_mode, batch.batch_size = Mode("IDLE"), 0
    backend.init_forward_metadata(batch)
    q = torch.zeros(0, 4 * 64)
    assert backend.forward(q, q, q, layer_of(sglang, CASES[0], 64), batch).shape == (0, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server_args": SimpleNamespace(dcp_size=2)}, "no decode context parallelism"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "no cross attention"),
        (
            {"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)},
            "no speculative decoding",
        ),
        ({"kv_cache_dtype": torch.float8_e5m2}, "no cache of torch.float8_e5m2; allowed: float16"),
    ],
)
def test_refused_models(sglang, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        sglang.CutlassAttnBackend(runner_of(CASES[0], None, table_of(CASES[0])[0], **changes))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        ({}, {"q_rope": torch.zeros(1)}, "no q_rope, which this model uses"),
        ({}, {"score_mod": print}, "no score_mod"),
        ({"xai_temperature_len": 5}, {}, "no xai_temperature_len, .* uses: 5; allowed: -1"),
        ({"is_cross_attention": True}, {}, "no is_cross_attention"),
        ({"logit_capping_method": "sigmoid"}, {}, "no logit_capping_method"),
    ],
)
def test_refused_layers(sglang, layer, options, message):
    case = CASES[0]
    table, requests, slots = table_of(case)
    pool = Pool(slots, case, 64, torch.float16)
    backend = sglang.CutlassAttnBackend(runner_of(case, pool, table))
    batch = batch_of(case, table, requests, *DECODE.values(), "DECODE")
    backend.init_forward_metadata(batch)
    q = torch.zeros(4, 4 * 64, dtype=torch.float16)
    k = torch.zeros(4, 2, 64, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=message):
        backend.forward(q, k, k, layer_of(sglang, case, 64, **layer), batch, **options)
    assert pool.buffers[0].isnan().all()  # nothing was written


def test_pools_of_another_layout_are_refused(sglang):
    case = CASES[0]
    table, requests, slots = table_of(case)
    pool = Pool(slots, case, 64, torch.float16)
    pool.buffers = [x.unflatten(0, (-1, 16)).transpose(1, 2) for x in pool.buffers]
    backend = sglang.CutlassAttnBackend(runner_of(case, pool, table))
    batch = batch_of(case, table, requests, *DECODE.values(), "DECODE")
    backend.init_forward_metadata(batch)
    q = torch.zeros(4, 4 * 64, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"4 dimensions; allowed: 3, \(slots, heads"):
        backend.forward(q, None, None, layer_of(sglang, case, 64), batch)


def test_sglang_finds_the_backend(sglang):
    entry_point("sglang.srt.plugins")()
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    assert "cutlass_attn" in registry.ATTENTION_BACKENDS
    choices = importlib.import_module("sglang.srt.server_args").ATTENTION_BACKEND_CHOICES
    assert choices.count("cutlass_attn") == 1


def test_other_versions(monkeypatch, caplog):
    with engine("sglang", "stub") as compat:
        import sglang as package

        monkeypatch.setattr(package, "__version__", "0.5.24.post1")
        message = "supports sglang from 0.5.23 to before 0.5.24; 0.5.24.post1 is installed"
        with pytest.raises(RuntimeError, match=message):
            compat.register()
        with caplog.at_level(logging.WARNING):
            compat.plugin()
        assert message in caplog.text
        with pytest.warns(UserWarning, match=message):
            compat.register(any_version=True)


def test_stub_has_the_signatures_of_sglang():
    pytest.importorskip("sglang")
    where = {
        "base_attn_backend": ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"),
        "memory_pool": ("sglang.srt.mem_cache.memory_pool", "KVWriteLoc"),
        "mla_pool": ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool"),
        "swa_memory_pool": ("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool"),
        "handler": (
            "sglang.srt.models.deepseek_common.attention_backend_handler",
            "AttentionBackendRegistry",
        ),
    }

    def parameters(function):
        given = inspect.signature(getattr(function, "__func__", function)).parameters.values()
        return [(x.name, x.default is x.empty) for x in given]

    def found():
        result = {}
        for module, name in where.values():
            for method, function in vars(getattr(importlib.import_module(module), name)).items():
                function = inspect.unwrap(getattr(function, "__func__", function))
                if inspect.isfunction(function):
                    result[name, method] = parameters(function)
        return result

    theirs = found()
    with stub("sglang"):
        ours = found()
    own = {key for key in ours if key[1].startswith("__")}  # what dataclasses generate
    assert len(ours) > 10
    assert {k: theirs.get(k) for k in ours.keys() - own} == {k: ours[k] for k in ours.keys() - own}
