"""compat.transformers: tiny models with random weights, against their own eager attention."""

import copy
import io
import pickle

import cutlass_attn
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402, importorskip gives a module that is replaced on import
from cutlass_attn.compat import transformers as compat  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register()


@pytest.fixture(scope="module")
def decoder(request):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | MODELS[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            torch.nn.init.normal_(layer.self_attn.sinks)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.mul_(4)  # logits of some size: softmax weights that differ
    return model


def padded(lengths, seqlen):
    """Token numbers and mask, padded on the left."""
    tokens = torch.randint(2, 97, (len(lengths), seqlen), generator=torch.manual_seed(1))
    mask = torch.arange(seqlen) >= seqlen - torch.tensor(lengths)[:, None]
    return tokens * mask, mask.long()


def with_each(model, function):
    """What the function gives with eager attention, and with this one."""
    results = []
    for name in ("eager", "cutlass_attn"):
        model.set_attn_implementation(name)
        results.append(function())
    return results


@pytest.mark.parametrize("decoder", MODELS, indirect=True)
@pytest.mark.parametrize("lengths", [(9, 9), (9, 3)], ids=["full", "padded"])
def test_logits(decoder, lengths):
    tokens, mask = padded(lengths, 9)
    due, result = with_each(
        decoder, lambda: decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", MODELS, indirect=True)
@pytest.mark.parametrize(
    ("cache", "lengths"),
    [("dynamic", (6, 2)), ("static", (6, 2)), ("static", (6, 6))],
    ids=["dynamic", "static", "static, no padding"],  # the last prefills without a mask
)
def test_generation(decoder, cache, lengths):
    """Beyond the window of the sliding layers, whose caches are rings then."""
    tokens, mask = padded(lengths, 6)
    due, result = with_each(
        decoder,
        lambda: decoder.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    assert torch.equal(result.sequences, due.sequences)
    torch.testing.assert_close(result.logits, due.logits, rtol=1e-3, atol=1e-3)
    assert len(set(due.sequences[0, 6:].tolist())) > 2  # tokens that depend on something


# --- Padding, which is handed over as lengths


@pytest.fixture
def calls(monkeypatch):
    """Keywords of each call of attention()."""
    seen = []

    def spy(*args, **options):
        seen.append(options)
        return cutlass_attn.attention(*args, **options)

    monkeypatch.setattr(compat, "cutlass_attn", type("Spy", (), {"attention": staticmethod(spy)}))
    return seen


def padded_on(side, lengths=(9, 3, 1), seqlen=9):
    tokens, mask = padded(lengths, seqlen)
    return (tokens, mask) if side == "left" else (tokens.flip(1), mask.flip(1))


LENGTHS = {"left": {"leftpad_k"}, "right": {"seqused_q", "seqused_k"}}


@pytest.mark.parametrize("decoder", MODELS, indirect=True)
@pytest.mark.parametrize("side", LENGTHS)
def test_padding_never_becomes_a_mask(decoder, side, calls):
    tokens, mask = padded_on(side)
    due, result = with_each(
        decoder, lambda: decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2  # layers
    for options in calls:
        assert options.keys().isdisjoint({"mask", "bias"})
        assert LENGTHS[side] == {x for x in options if x.startswith(("leftpad", "seqused"))}
        assert options.get("causal") or options["window"] == (3, 0)
    assert any("window" in x for x in calls) == ("sliding_window" in decoder.config.to_dict())


def test_lengths_of_padding(calls):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.set_attn_implementation("cutlass_attn")
    for side, due in (
        ("left", {"leftpad_k": [0, 6, 8]}),
        ("right", {"seqused_q": [9, 3, 1], "seqused_k": [9, 3, 1]}),
    ):
        tokens, mask = padded_on(side)
        model(input_ids=tokens, attention_mask=mask)
        assert {name: calls[-1][name].tolist() for name in due} == due


@pytest.mark.parametrize("decoder", ["Llama", "Mistral"], indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_of_a_cache(decoder, cache, calls):
    """Prompts that are padded on the left, and a chunk of keys that comes behind them."""
    tokens, mask = padded_on("left", seqlen=6, lengths=(6, 2, 1))

    def generate():
        return decoder.generate(
            tokens, attention_mask=mask, max_new_tokens=6, do_sample=False,
            cache_implementation=cache, disable_compile=True,
        )  # fmt: skip

    due, result = with_each(decoder, generate)
    assert torch.equal(result, due)
    # A static cache has a mask for each new token, of one row.
    masks = [x["mask"] for x in calls if "mask" in x]
    assert all(x.shape[2] == 1 for x in masks)
    assert (cache == "dynamic") == (not masks)


@pytest.mark.parametrize("decoder", ["Llama"], indirect=True)
def test_chunks_of_a_padded_prompt(decoder, calls):
    """Queries that are not the first ones: they begin behind the padding, or within it."""
    tokens, mask = padded_on("left", lengths=(9, 6, 2))

    def run():
        cache = transformers.DynamicCache(config=decoder.config)
        parts = []
        for rows in (slice(0, 4), slice(4, 9)):
            parts.append(
                decoder(
                    input_ids=tokens[:, rows],
                    attention_mask=mask[:, : rows.stop],
                    past_key_values=cache,
                ).logits
            )
        return torch.cat(parts, 1)[mask.bool()]

    due, result = with_each(decoder, run)
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)
    assert all("mask" not in x for x in calls)


@pytest.mark.parametrize("decoder", ["Llama"], indirect=True)
def test_holes_stay_a_mask(decoder, calls):
    tokens, mask = padded((9, 9), 9)
    mask[0, 3] = 0
    due, result = with_each(
        decoder, lambda: decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)
    assert all(x["mask"].shape == (2, 1, 9, 9) for x in calls)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
@pytest.mark.parametrize("side", LENGTHS)
def test_padding_of_an_encoder(name, side, calls):
    """Of keys alone: queries of padding have results as before."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    if name == "ModernBert":
        sizes |= {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    tokens, mask = padded_on(side)
    with torch.no_grad():
        due, result = with_each(
            model,
            lambda: model(input_ids=tokens, attention_mask=mask).last_hidden_state[mask.bool()],
        )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)
    assert calls
    assert all("mask" not in x for x in calls)


@pytest.mark.parametrize("side", LENGTHS)
def test_training_of_a_padded_batch(side, calls):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tokens, mask = padded_on(side)
    labels = tokens.masked_fill((mask == 0) | (mask.cumsum(-1) <= 1), -100)

    def step():
        model.zero_grad()
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
        return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}

    due, got = with_each(model.train(), step)
    for parameter, x in due.items():
        torch.testing.assert_close(got[parameter], x, rtol=1e-3, atol=1e-5)
    assert all("mask" not in x for x in calls)


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()))


def test_what_reads_a_mask_of_padding_gets_its_numbers():
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    _, mask = padded((9, 3), 9)
    given = {
        "batch_size": 2, "q_length": 9, "kv_length": 9, "q_offset": 0, "kv_offset": 0,
        "mask_function": causal_mask_function, "attention_mask": mask.bool(),
    }  # fmt: skip
    found, due = compat.mask_function(**given), sdpa_mask(**given)
    assert type(found) is compat.PaddingMask
    assert (found.shape, found.dtype, found.device) == (due.shape, due.dtype, due.device)
    for read in (lambda x: x[:, :, :4], lambda x: ~x, lambda x: torch.cat([x, x]), lambda x: x * 1):
        assert type(read(found)) is torch.Tensor
        assert torch.equal(read(found), read(due))
    for copied in (
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        saved_and_loaded(found),
    ):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, due)
    assert (found.numpy() == due.numpy()).all()
    assert found.tolist() == due.tolist()
    found = compat.mask_function(**given)  # without numbers
    q, k, v = (x[:, :, :1].expand(-1, -1, 9, -1) for x in operands())
    # With what has a place for every key, and of other operands than it was made for.
    for more, rows in (({"position_bias": torch.zeros(1, 4, 9, 9)}, 9), ({}, 4)):
        part = found if rows == 9 else found[:, :, :rows]
        out, _ = compat.attention_forward(Layer(), q[:, :, :rows], k, v, part, **more)
        dense, _ = compat.attention_forward(Layer(), q[:, :, :rows], k, v, due[:, :, :rows], **more)
        torch.testing.assert_close(out, dense)
    whole = compat.mask_function(**{**given, "allow_is_causal_skip": False})
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, due)


KEYS = torch.arange(9)


def test_what_is_written_to_a_mask_of_padding_counts(calls):
    """By a model that hides one more key, in a part of the mask or in the mask itself."""
    from transformers.masking_utils import causal_mask_function

    _, mask = padded((9, 3), 9)
    q, k, v = operands(9, 9)
    for write in (lambda x: x[:, :, :, 7].fill_(False), lambda x: x.logical_and_(KEYS != 7)):
        found = compat.mask_function(
            batch_size=2, q_length=9, kv_length=9, q_offset=0, kv_offset=0,
            mask_function=causal_mask_function, attention_mask=mask.bool(),
        )  # fmt: skip
        write(found)
        compat.attention_forward(Layer(), q, k, v, found)
        seen = (mask[:, None, None] == 1) & (KEYS[:, None] >= KEYS) & (KEYS != 7)
        assert torch.equal(calls[-1]["mask"], seen)


@pytest.mark.parametrize("decoder", ["Llama"], indirect=True)
def test_compiled_model_with_padding(decoder):
    """Which has a mask: lengths are numbers that are looked at."""
    torch.compiler.reset()
    tokens, mask = padded_on("left")
    decoder.set_attn_implementation("cutlass_attn")
    due = decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    compiled = torch.compile(decoder, backend="aot_eager")
    result = compiled(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", ["Llama"], indirect=True)
def test_compiled_layers_with_padding(decoder):
    """Layers that torch compiles one by one are given the mask."""
    torch.compiler.reset()
    tokens, mask = padded_on("left")
    decoder.set_attn_implementation("cutlass_attn")
    due = decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    layers = list(decoder.model.layers)
    for i, layer in enumerate(layers):
        decoder.model.layers[i] = torch.compile(layer, backend="aot_eager")
    try:
        result = decoder(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
    finally:
        for i, layer in enumerate(layers):
            decoder.model.layers[i] = layer
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", ["Llama"], indirect=True)
def test_packed_by_positions(decoder):
    tokens, _ = padded((9,), 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    due, result = with_each(
        decoder,
        lambda: decoder(input_ids=tokens, position_ids=positions, use_cache=False).logits,
    )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)


def test_encoder():
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    tokens, mask = padded((9, 4), 9)
    with torch.no_grad():
        due, result = with_each(
            model,
            lambda: model(input_ids=tokens, attention_mask=mask).last_hidden_state[mask.bool()],
        )
    torch.testing.assert_close(result, due, rtol=1e-4, atol=1e-4)


def test_encoder_and_decoder_with_position_bias():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=48, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False).mul_(2)
    tokens, mask = padded((9, 4), 9)
    due, result = with_each(
        model,
        lambda: (
            model(input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens.flip(0)).logits
        ),
    )
    torch.testing.assert_close(result, due, rtol=1e-3, atol=1e-3)
    for cache in ("dynamic", "static"):
        due, result = with_each(
            model,
            lambda cache=cache: model.generate(
                tokens, attention_mask=mask, max_new_tokens=4, do_sample=False,
                cache_implementation=cache, disable_compile=True,
            ),
        )  # fmt: skip
        assert torch.equal(result, due)


# --- the function itself


class Layer(torch.nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def operands(seqlen_q=5, seqlen_k=5, heads=4, heads_kv=2):
    torch.manual_seed(2)
    q = torch.randn(2, seqlen_q, heads, 16).transpose(1, 2)
    return q, *torch.randn(2, 2, heads_kv, seqlen_k, 16)


def test_prefill_of_a_longer_cache():
    """Without a mask the causal one is aligned top-left."""
    q, k, v = operands(5, 12)
    out, weights = compat.attention_forward(Layer(), q, k, v, None)
    due = cutlass_attn.attention(q, k[:, :, :5], v[:, :, :5], causal=True)
    torch.testing.assert_close(out, due.transpose(1, 2))
    assert weights is None
    assert out.is_contiguous()
    one, _ = compat.attention_forward(Layer(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(one, cutlass_attn.attention(q[:, :, :1], k, v).transpose(1, 2))


def test_position_bias_of_a_longer_cache():
    q, k, v = operands(5, 12)
    bias = torch.randn(1, 4, 5, 12)
    out, _ = compat.attention_forward(Layer(), q, k, v, None, position_bias=bias)
    due = cutlass_attn.attention(
        q, k[:, :, :5], v[:, :, :5], causal=True, bias=bias[..., :5]
    ).transpose(1, 2)
    torch.testing.assert_close(out, due)
    added = torch.randn(2, 1, 5, 12)
    out, _ = compat.attention_forward(Layer(), q, k, v, added, position_bias=bias)
    torch.testing.assert_close(
        out, cutlass_attn.attention(q, k, v, bias=bias + added).transpose(1, 2)
    )


def test_is_causal():
    """The argument counts before the module's; a mask before both."""
    q, k, v = operands()
    full = cutlass_attn.attention(q, k, v).transpose(1, 2)
    for module, options in ((Layer(False), {}), (Layer(), {"is_causal": False})):
        out, _ = compat.attention_forward(module, q, k, v, None, **options)
        torch.testing.assert_close(out, full)
    all_seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    torch.testing.assert_close(compat.attention_forward(Layer(), q, k, v, all_seen)[0], full)


def test_options():
    q, k, v = operands()
    sinks = torch.randn(4).bfloat16()
    due = cutlass_attn.attention(
        q, k, v, causal=True, softcap=3.0, softmax_scale=0.7, sinks=sinks.float()
    ).transpose(1, 2)
    options = {"softcap": 3.0, "scaling": 0.7}
    for name in ("s_aux", "sinks"):
        out, _ = compat.attention_forward(Layer(), q, k, v, None, **options, **{name: sinks})
        torch.testing.assert_close(out, due)
    # A window is in the mask, or there are not so many keys.
    out, _ = compat.attention_forward(
        Layer(), q, k, v, None, **options, s_aux=sinks, sliding_window=2, use_cache=True
    )
    torch.testing.assert_close(out, due)
    assert (compat.attention_forward(Layer(), q, k, v, None, dropout=1.0)[0] == 0).all()


def test_query_that_is_learned():
    """With a batch of one over a batch of keys."""
    q, k, v = operands()
    out, _ = compat.attention_forward(Layer(False), q[:1], k, v, None)
    due = cutlass_attn.attention(q[:1].expand(2, -1, -1, -1), k, v).transpose(1, 2)
    torch.testing.assert_close(out, due)


def test_packed_by_offsets():
    q, k, v = (x[:1] for x in operands(9, 9))
    at = torch.tensor([0, 4, 9])
    out, _ = compat.attention_forward(
        Layer(), q, k, v, None, cu_seq_lens_q=at, cu_seq_lens_k=at, max_length_q=5, max_length_k=5
    )
    for rows in (slice(0, 4), slice(4, 9)):
        parts = (x[:, :, rows] for x in (q, k, v))
        due = cutlass_attn.attention(*parts, causal=True).transpose(1, 2)
        torch.testing.assert_close(out[:, rows], due)
    q, k, v = operands(9, 9)
    with pytest.raises(ValueError, match="needs a batch of one, got one of 2"):
        compat.attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=at, cu_seq_lens_k=at)


def test_keywords():
    call = lambda **o: compat.attention_forward(Layer(), *operands(), None, **o)  # noqa: E731
    with pytest.raises(ValueError, match="no sparse attention: indices must be None"):
        call(indices=torch.zeros(1))
    with pytest.raises(ValueError, match="this model passes head_mask, hidden_gate, which"):
        call(head_mask=torch.ones(1), hidden_gate=1.0)
    with pytest.raises(ValueError, match="local_kernel_dir"):
        call(cache=object())
    with pytest.warns(UserWarning, match="no attention weights"):
        call(output_attentions=True)
    call(indices=None, block_indices=None, position_ids=torch.zeros(1), output_attentions=False)
    call(head_mask=torch.ones(1), hidden_gate=1.0, ignore=["head_mask", "hidden_gate"])


def gradients(model):
    """Of all parameters with each, in a step on sequences of two lengths."""
    tokens, mask = padded([9, 5], 9)
    # What padding predicts is anything: the first token of a sequence, too.
    labels = tokens.masked_fill(mask.cumsum(-1) <= 1, -100)

    def step():
        model.zero_grad()
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
        return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}

    due, got = with_each(model.train(), step)
    assert due.keys() == got.keys()
    return due, got


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    """Gradients are those of eager attention, sinks' among them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    due, got = gradients(getattr(transformers, f"{name}ForCausalLM")(config))
    assert (name == "GptOss") == any("sinks" in parameter for parameter in due)
    for parameter, x in due.items():
        torch.testing.assert_close(got[parameter], x, rtol=1e-3, atol=1e-5)


def test_training_with_a_position_bias():
    """T5 learns what it adds to the logits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    config = transformers.T5Config(
        **sizes, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    due, got = gradients(transformers.T5ForConditionalGeneration(config))
    biases = [due[parameter] for parameter in due if "relative_attention_bias" in parameter]
    assert len(biases) == 2
    assert all(x.abs().max() > 0 for x in biases)
    for parameter, x in due.items():
        torch.testing.assert_close(got[parameter], x, rtol=1e-3, atol=1e-5)


def test_compiled_without_a_graph_break():
    q, k, v = operands()
    layer, sinks = Layer(), torch.randn(4)
    function = torch.compile(
        lambda q, k, v: compat.attention_forward(layer, q, k, v, None, s_aux=sinks)[0],
        fullgraph=True,
        backend="aot_eager",
    )
    due = compat.attention_forward(layer, q, k, v, None, s_aux=sinks)[0]
    torch.testing.assert_close(function(q, k, v), due)
