"""compat.sglang for models with latent attention: batches of an engine through the backend.

As in test_sglang.py the backend stands on SGLang's own classes where that is installed, else on
stubs/sglang, and the pool is this test's."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cutlass_attn  # noqa: E402
import serving  # noqa: E402
from compat.engine import engine, rows_of  # noqa: E402
from compat.test_sglang import batch_of, layer_of, runner_of, table_of  # noqa: E402
from serving import LATENT, Batch  # noqa: E402

HEADS, SCALE = 2, LATENT["softmax_scale"]
ONE = {"seqlens_q": (1, 1, 1), "seqlens_k": (1, 17, 40), "heads": HEADS, "causal": True, **LATENT}
MIXED = ONE | {"seqlens_q": (1, 20, 7), "seqlens_k": (40, 20, 21)}
CASES = [
    Batch("decode", "one query of each", **ONE, page=16),
    Batch("decode, page 1", "SGLang's default", **ONE, page=1),
    Batch("mixed", "prompts, their later parts and decoding", **MIXED, page=16),
    Batch("mixed, page 1", "SGLang's default", **MIXED, page=1),
]


@pytest.fixture(scope="module", params=["stub", "installed"])
def sglang(request):
    """The module of the backend; `registry` is SGLang's of backends."""
    with engine("sglang", request.param) as compat:
        compat.register()
        module = importlib.import_module("cutlass_attn.compat.sglang.mla")
        name = "sglang.srt.layers.attention.attention_registry"
        module.registry = importlib.import_module(name)
        yield module


class Pool:
    """Latents of one layer, (slots, 1, columns), NaN where nothing was written."""

    def __init__(self, slots, columns, dtype):
        self.buffers = [torch.full((slots, 1, columns), torch.nan, dtype=dtype)]

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override=None):
        assert layer_id_override is None
        self.buffers[0][loc_info.loc] = cache_k[: len(loc_info.loc)]

    def set_mla_kv_buffer(
        self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=None
    ):
        self.set_kv_buffer(layer, loc_info, torch.cat([cache_k_nope, cache_k_rope], dim=-1), None)


def backend_of(sglang, case, pool, table, **changes):
    """As SGLang makes it, by name."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "is_encoder_decoder": False}
    given = {"use_mla_backend": True, "model_config": SimpleNamespace(**sizes)}
    make = sglang.registry.ATTENTION_BACKENDS["cutlass_attn"]
    return make(runner_of(case, pool, table, **given | changes))


def mode_of(case):
    return "DECODE" if set(case.seqlens_q) == {1} else "MIXED"


def batch(case, table, requests, rows, until, mode, **more):
    """With SGLang's attributes for the prefill of such models."""
    found = batch_of(case, table, requests, rows, until, mode)
    names = "attn_attend_prefix_cache", "mha_return_lse", "mha_one_shot"
    vars(found).update(dict.fromkeys(names), **more)
    return found


def run(sglang, case, dtype, is_split, padding=0):
    """Writes the earlier latents as one batch and runs the last; what each sequence gets."""
    like = getattr(torch, dtype)
    table, requests, slots = table_of(case)
    pool = Pool(slots, case.head_dim, like)
    backend, layer = backend_of(sglang, case, pool, table), layer_of(sglang, case, case.head_dim)
    parts = serving.values(case, dtype, case.head_dim)
    before = [n - r for r, n in zip(case.seqlens_q, case.seqlens_k)]

    def step(rows, until, mode, queries, in_graph):
        q, k = (
            rows_of(x, like, spare=padding)
            for x in (queries, [x[1][:, n - r : n] for x, r, n in zip(parts, rows, until)])
        )
        given = batch(case, table, requests, rows, until, mode)
        if in_graph:
            # Padding decodes a key of slot 0, as does what else is in the graph for it.
            given.batch_size += padding
            given.seq_lens = torch.cat([given.seq_lens, torch.ones(padding, dtype=torch.int64)])
            unused = [r for r in range(len(table)) if r not in requests][:1] * padding
            given.req_pool_indices = torch.cat([requests, torch.tensor(unused)])
            given.out_cache_loc = torch.cat([given.out_cache_loc, torch.zeros(padding).long()])
            backend.init_cuda_graph_state(8, 8)
            backend.init_forward_metadata_out_graph(given, in_capture=True)
            backend.init_forward_metadata_in_graph(given)
        else:
            backend.init_forward_metadata(given)
        k_nope = k[..., : case.head_dim_v]
        if not is_split:
            return backend.forward(q.flatten(1), k, k_nope, layer, given)
        q_nope, q_rope = q.split([case.head_dim_v, case.head_dim - case.head_dim_v], dim=-1)
        rope = {"q_rope": q_rope, "k_rope": k[..., case.head_dim_v :]}
        return backend.forward(q_nope, k_nope, k_nope, layer, given, **rope)

    nothing = [np.zeros((HEADS, n, case.head_dim), np.float32) for n in before]
    step(before, before, "EXTEND", nothing, False)
    queries = [x[0] for x in parts]
    out = step(case.seqlens_q, case.seqlens_k, mode_of(case), queries, bool(padding))
    assert out.shape[1] == HEADS * case.head_dim_v
    rows = out.unflatten(1, (HEADS, -1))[: sum(case.seqlens_q)].split(case.seqlens_q)
    return [x.transpose(0, 1).float().numpy() for x in rows]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("is_split", [False, True], ids=["concatenated", "split"])
def test_batches(sglang, case, is_split):
    """Queries and keys come in one tensor, or the rotated columns in another."""
    serving.judge(case, "bfloat16", 576, run(sglang, case, "bfloat16", is_split))


def test_padded_graph(sglang, monkeypatch):
    """Decoding runs the function that chooses tiles for one query a sequence."""
    decode, shapes = cutlass_attn.attention_decode, []

    def recorded(q, *operands, **options):
        shapes.append(tuple(q.shape))
        return decode(q, *operands, **options)

    monkeypatch.setattr(cutlass_attn, "attention_decode", recorded)
    serving.judge(CASES[0], "float16", 576, run(sglang, CASES[0], "float16", False, padding=3))
    assert shapes == [(6, 1, HEADS, 576)]


@pytest.mark.parametrize("way", ["new tokens", "one shot", "chunks"])
def test_expanded_prefill(sglang, way):
    """What a model of DeepSeek's does with long prefill: keys and values of its heads, not in the
    cache. With contexts it passes all at once, or parts whose results it merges."""
    rows, keys = (9, 4), (9, 4) if way == "new tokens" else (39, 24)
    heads = {"heads": HEADS, "heads_kv": HEADS, "head_dim_v": 128, "softmax_scale": SCALE}
    case = Batch("expanded", "", rows, keys, page=16, causal=True, **heads)
    table, requests, slots = table_of(case)
    backend = backend_of(sglang, case, Pool(slots, 576, torch.bfloat16), table)
    layer = layer_of(sglang, case, 192)
    parts = serving.values(case, "bfloat16", 192)
    given = batch(case, table, requests, rows, keys, "EXTEND")
    backend.init_forward_metadata(given)

    def forward(until, **of_batch):
        """Over keys from and until numbers for each sequence."""
        vars(given).update(of_batch)
        q = rows_of([x[0] for x in parts], torch.bfloat16, spare=0)
        k, v = (
            rows_of([x[i][:, a:b] for x, (a, b) in zip(parts, until)], torch.bfloat16, spare=0)
            for i in (1, 2)
        )
        return backend.forward(q, k, v, layer, given, save_kv_cache=False)

    new = [(n - r, n) for r, n in zip(rows, keys)]
    if way == "new tokens":
        out = forward(new)
    elif way == "one shot":
        out = forward([(0, n) for n in keys], mha_one_shot=True, attn_attend_prefix_cache=False)
    else:
        found = [forward(new, mha_return_lse=True, attn_attend_prefix_cache=False)]
        chunks = [[(0, 16), (0, 16)], [(16, 30), (16, 20)]]
        given.prefix_chunk_cu_seq_lens = serving.int32([0, 16, 32, 0, 14, 18]).view(2, 3)
        for i, until in enumerate(chunks):
            found.append(forward(until, attn_attend_prefix_cache=True, prefix_chunk_idx=i))
        outs, lses = zip(*found)
        assert outs[0].shape == (13, HEADS, 128) and lses[0].shape == (13, HEADS)
        shares = torch.stack(lses).softmax(0)[..., None]
        out = (torch.stack(outs).float() * shares).sum(0).bfloat16()
    outs = out.unflatten(1, (HEADS, -1)) if out.dim() == 2 else out
    outs = [x.transpose(0, 1).float().numpy() for x in outs.split(rows)]
    serving.judge(case, "bfloat16", 192, outs)


def test_what_sglang_asks_of_the_model(sglang):
    handler = "sglang.srt.models.deepseek_common.attention_backend_handler"
    handler = importlib.import_module(handler)
    found = handler.AttentionBackendRegistry.get_handler("cutlass_attn")
    assert found is handler.handle_attention_fa3
    args = importlib.import_module("sglang.srt.server_args")
    assert "cutlass_attn" in args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS


def test_class_of_a_model(sglang):
    case, (table, _, slots) = CASES[0], table_of(CASES[0])
    pool = Pool(slots, 576, torch.float16)
    assert type(backend_of(sglang, case, pool, table)) is sglang.CutlassAttnMLABackend
    dense = backend_of(sglang, case, pool, table, use_mla_backend=False)
    assert type(dense) is sglang.CutlassAttnBackend


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_dtype": torch.float8_e4m3fn},
            "no cache of torch.float8_e4m3fn; allowed: float16, bfloat16$",
        ),
        ({"token_to_kv_pool": SimpleNamespace(use_dsa=True)}, r"no sparse attention \(DSA\)"),
        (
            {
                "model_config": SimpleNamespace(
                    kv_lora_rank=1024, qk_rope_head_dim=64, is_encoder_decoder=False
                )
            },
            r"no latents of 1088 columns \(kv_lora_rank \+ qk_rope_head_dim\); allowed: up to 576",
        ),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "no decode context parallelism"),
    ],
)
def test_refused_models(sglang, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        backend_of(sglang, CASES[0], None, table_of(CASES[0])[0], **changes)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        ({"sliding_window_size": 127}, {}, "no sliding_window_size, .*: 127; allowed: -1"),
        ({"logit_cap": 30.0}, {}, r"no logit_cap, .*: 30\.0; allowed: 0\.0"),
        ({"is_cross_attention": True}, {}, "no is_cross_attention"),
        ({}, {"topk_indices": torch.zeros(1)}, "no topk_indices, .*; allowed: None"),
        ({}, {"sinks": torch.zeros(HEADS)}, "no sinks, .*; allowed: None"),
    ],
)
def test_refused_layers(sglang, layer, options, message):
    case, (table, requests, slots) = CASES[0], table_of(CASES[0])
    pool = Pool(slots, 576, torch.float16)
    backend = backend_of(sglang, case, pool, table)
    given = batch(case, table, requests, case.seqlens_q, case.seqlens_k, "DECODE")
    backend.init_forward_metadata(given)
    q, k = torch.zeros(3, HEADS * 576).half(), torch.zeros(3, 1, 576).half()
    with pytest.raises(NotImplementedError, match=message):
        backend.forward(q, k, k, layer_of(sglang, case, 576, **layer), given, **options)
    assert pool.buffers[0].isnan().all()  # nothing was written
