"""compat.comfyui against ComfyUI's hook, as its attention.py has it (commit 05080f6)."""

import functools
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import cutlass_attn  # noqa: E402
from cutlass_attn.compat import comfyui as compat  # noqa: E402
from cutlass_attn.compat import sdpa  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "comfyui"


def wrap_attn(func):
    """What ComfyUI wraps each of its attention functions in: asks for the override once."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        kwargs.pop("preferred_attention", None)
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            options = kwargs.get("transformer_options") or {}
            if "optimized_attention_override" in options:
                return options["optimized_attention_override"](func, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapper


RUNS = []


@wrap_attn
def attention_pytorch(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    **kwargs,
):
    """ComfyUI's function for PyTorch."""
    RUNS.append(kwargs)
    b = q.shape[0]
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    more = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(b, -1, heads * v.shape[-1])


def operands(skip_reshape, heads_kv=4, dtype=torch.float16, seqlen_q=6, seqlen_k=9):
    generator = torch.Generator().manual_seed(0)
    shapes = (seqlen_q, 4), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    rows = [torch.randn(2, *shape, 32, generator=generator).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).contiguous() if skip_reshape else x.flatten(2) for x in rows]


def masks():
    seen = torch.rand(2, 6, 9, generator=torch.Generator().manual_seed(1)) < 0.7
    return {
        "none": None,
        "2-D": seen[0],
        "3-D": seen,
        "4-D": seen[:, None],
        "added": torch.where(seen[:1], 0.5, -torch.inf).half(),
    }


def run(*args, override=None, **kwargs):
    """The result, and whether ComfyUI's own function ran."""
    RUNS.clear()
    options = {} if override is None else {"optimized_attention_override": override}
    return attention_pytorch(*args, transformer_options=options, **kwargs), bool(RUNS)


FORMS = list(itertools.product([False, True], [False, True], masks()))


@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape", "mask"), FORMS)
@pytest.mark.parametrize("more", [{}, {"scale": 0.3, "enable_gqa": True}], ids=["", "gqa"])
def test_forms(skip_reshape, skip_output_reshape, mask, more):
    args = [*operands(skip_reshape, heads_kv=2 if more else 4), 4]
    forms = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    forms |= {"mask": masks()[mask], **more}
    due, _ = run(*args, **forms)
    out, theirs = run(*args, **forms, override=compat.override())
    assert not theirs
    assert out.shape == due.shape
    if not skip_output_reshape:
        assert out.is_contiguous()
    torch.testing.assert_close(out, due, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"dtype": torch.float32}, {}),
        ({}, {"a_new_keyword": 5}),
        ({}, {"attn_precision": torch.float32, "a_new_keyword": 5}),
    ],
)
def test_calls_for_the_function_of_comfyui(change, more):
    """It gets all arguments, and is not overridden again."""
    args = [*operands(False, **change), 4]
    out, theirs = run(*args, mask=masks()["3-D"], **more, override=compat.override("qk"))
    assert theirs
    assert all(RUNS[0].get(name) == x for name, x in more.items() if name != "attn_precision")
    due, _ = run(*args, mask=masks()["3-D"])
    torch.testing.assert_close(out, due)


def test_harmless_keywords_stay_here():
    args = [*operands(False), 4]
    more = {"low_precision_attention": False, "attn_precision": torch.float32}
    assert not run(*args, **more, override=compat.override("qk"))[1]


@pytest.fixture
def asked(monkeypatch):
    """What is asked for of `attention`, whose kernels of 8 bits run on GPUs alone."""
    found, run_of = [], sdpa.Call.run

    def record(call):
        found.append(call.options.pop("quantize", None))
        if found[-1] == "fp8":
            raise ValueError("no kernel of this build accepts this call")
        return run_of(call)

    monkeypatch.setattr(sdpa.Call, "run", record)
    return found


def test_eight_bits(asked):
    args = [*operands(True), 4]
    due, _ = run(*args, skip_reshape=True)
    for quantize, more, expected in (
        (None, {}, [None]),
        ("int8", {}, ["int8"]),
        ("int8", {"low_precision_attention": False}, [None]),
        ("fp8", {}, ["fp8", None]),
    ):
        asked.clear()
        out, theirs = run(*args, skip_reshape=True, **more, override=compat.override(quantize))
        assert not theirs and asked == expected
        torch.testing.assert_close(out, due, rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="quantize must be None"):
        compat.override("int4")


@pytest.mark.parametrize("quantize", ["qk", "int8", "fp8"])
def test_kernels_of_eight_bits_take_the_calls(quantize, asked, monkeypatch):
    """On a GPU; what a refusal would hide."""
    monkeypatch.setattr(sdpa.Call, "run", lambda call: asked.append(call) or call.operands[0])
    run(*operands(False), 4, override=compat.override(quantize))
    (call,) = asked
    assert call.options["quantize"] == quantize
    assert cutlass_attn.explain(*call.operands, **call.options, device="sm_89").chosen


class Model:
    """A ModelPatcher, whose clone shares dicts here, so that a change of one would show."""

    def __init__(self, options):
        self.model_options = options

    def clone(self):
        return Model(self.model_options)


def test_node_of_the_folder():
    spec = importlib.util.spec_from_file_location("cutlass_attn_node", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys()
    (node,) = module.NODE_CLASS_MAPPINGS.values()
    inputs = node.INPUT_TYPES()["required"]
    (products,) = inputs["products"]
    given = Model({"transformer_options": {"patches": 1}, "other": 2})
    for choice in products:
        (model,) = getattr(node(), node.FUNCTION)(model=given, products=choice)
        options = model.model_options["transformer_options"]
        assert options["patches"] == 1 and model.model_options["other"] == 2
        out = attention_pytorch(*operands(False), 4, transformer_options=options)
        assert out.shape == (2, 6, 128)
    assert given.model_options == {"transformer_options": {"patches": 1}, "other": 2}
    assert SimpleNamespace(**inputs).model == ("MODEL",)
