"""Implementations of attention: this library's calls, PyTorch's, other libraries'.

All get equal values. Implementations with another layout than (B, H, S, D) get a copy in theirs,
made outside of the timed call. Those without paged caches get the keys in a contiguous cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any

from cutlass_attn import attention, attention_decode, attention_varlen, explain
from cutlass_attn._variants import quantize_of
from cutlass_attn.tools.experiment import impls
from cutlass_attn.tools.experiment.impls import (
    OURS,
    TORCH_BACKENDS,
    Bound,
    Impl,
    Unsupported,
    describe_error,
    prepare_attention,
    prepare_torch,
    refusal,
    torch_attention,
    torch_backend,
)
from cutlass_attn.tools.experiment.judge import Yardstick
from cutlass_attn.tools.experiment.problems import FP8_CACHE, TOKENS, Inputs

from .gradients import BackwardPass, GradientYardstick, KernelPass

# Those of OPS whose operands are dense arrays as well.
_DENSE_OPS = ("forward", "decode", "paged")
_TORCH_OPS = (*_DENSE_OPS, "backward")
_FLEX_OPS = ("forward", "backward")


def yardstick(inputs: Inputs, accumulate: str, whole: bool, quantize: str | None) -> Any:
    """Judges the results of a problem without an option."""
    if inputs.problem.op == "backward":
        return GradientYardstick(inputs)
    if quantize == FP8_CACHE:
        return Yardstick(inputs.rounded_to_fp8, accumulate, whole)
    if quantize == TOKENS:
        return Yardstick(inputs.rounded_to_tokens, accumulate, whole)
    return Yardstick(inputs, accumulate, whole, quantize)


def ours(kernels: Iterable[str], op: str = "forward") -> list[Impl]:
    """This library's implementations of any op; see `experiment.impls.ours`."""
    return impls.ours(kernels, op, _prepare_ours)


def torchs(backends: Iterable[str]) -> list[Impl]:
    """PyTorch's implementations: backends of TORCH_BACKENDS, or "auto"."""
    return [
        Impl(f"torch:{name}", partial(_prepare_torch, name), ops=_TORCH_OPS) for name in backends
    ]


def discover(
    kernels: Iterable[str] = (), torch_auto: bool = False, op: str = "forward"
) -> tuple[list[Impl], dict[str, str]]:
    """All implementations of `op`, one of OPS, and for absent ones {name: reason}.

    `kernels` are kernels or variants of this library, in addition to the one that "auto" chooses;
    an unknown one raises ValueError. `torch_auto` adds PyTorch's attention with the backend of its
    own choice.
    """
    found = ours(["auto", *kernels], op)
    found.append(Impl(f"{OURS}:contiguous", _prepare_contiguous, ops=("paged",)))
    found.append(Impl(f"{OURS}:{FP8_CACHE}", _prepare_fp8_cache, ops=("decode", "paged")))
    found.append(Impl(f"{OURS}:{TOKENS}", _prepare_tokens, ops=("latent",)))
    found.append(Impl(f"{OURS}:dense", _prepare_each, ops=("varlen",)))
    found += torchs(("auto",) * torch_auto + TORCH_BACKENDS)
    absent = {}
    if op in _FLEX_OPS:
        found.append(Impl("torch:flex", _prepare_flex, ops=_FLEX_OPS))
    if (varlen_attn := _torch_varlen()) is not None:
        prepare = partial(_prepare_torch_varlen, varlen_attn)
        found.append(Impl("torch:varlen", prepare, ops=("paged", "varlen")))
    elif op in ("paged", "varlen"):
        absent["torch:varlen"] = "this torch has no torch.nn.attention.varlen"
    if op == "latent":
        if importlib.util.find_spec("flash_mla") is None:
            absent["flash_mla"] = "not installed"
        else:
            found.append(Impl("flash_mla", _prepare_flash_mla, ops=("latent",)))
    for peer in _PEERS if op in _DENSE_OPS else ():
        try:
            module = importlib.import_module(peer.module)
        except ModuleNotFoundError as error:
            missing = f"{peer.module}.".startswith(f"{error.name}.")
            absent[peer.name] = "not installed" if missing else describe_error(error)
        except Exception as error:  # a library built for another torch or GPU raises anything
            absent[peer.name] = describe_error(error)
        else:
            if hasattr(module, peer.function):
                prepare = partial(_prepare_peer, peer, module)
                found.append(Impl(peer.name, prepare, _version(peer.module), _DENSE_OPS))
            else:
                absent[peer.name] = f"{peer.module} has no {peer.function}"
    return [impl for impl in found if op in impl.ops], absent


def _version(module: str) -> str:
    """The version of an imported module, of its package, or of the distributions that have it."""
    top = module.partition(".")[0]
    for name in (module, top):
        if version := getattr(sys.modules[name], "__version__", None):
            return str(version)
    distributions = metadata.packages_distributions().get(top, [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in distributions)


def select(impls: list[Impl], absent: dict[str, str], wanted: Iterable[str]) -> list[Impl]:
    """Selects implementations by their names, or the parts of them before the colon; all if
    `wanted` is empty. Raises ValueError for an unknown name."""
    wanted = list(wanted)
    for name in wanted:
        if name in absent:
            raise ValueError(f"the implementation {name!r} is absent: {absent[name]}")
        if not any(_matches(impl, name) for impl in impls):
            there = ", ".join(impl.name for impl in impls)
            raise ValueError(f"there is no implementation {name!r} here; there are {there}")
    return [impl for impl in impls if not wanted or any(_matches(impl, x) for x in wanted)]


def _matches(impl: Impl, name: str) -> bool:
    return name in (impl.name, impl.name.partition(":")[0])


def _prepare_ours(kernel: str, inputs: Inputs) -> Bound:
    prepare = {
        "forward": prepare_attention,
        "varlen": _prepare_varlen,
        "backward": _prepare_backward,
    }
    return prepare.get(inputs.problem.op, _prepare_decode)(kernel, inputs)


def _prepare_backward(kernel: str, inputs: Inputs) -> Bound:
    """The call of `attention`. A backward kernel that is given by name runs without autograd, which
    has no keyword for it."""
    options = {"causal": inputs.shape.causal, **inputs.keywords.ours}
    if kernel != "auto":
        return _of_kernel(kernel, KernelPass(inputs, options))
    explanation = explain(inputs.q, inputs.k, inputs.v, **options, grad=True)
    if (chosen := explanation.chosen) is None:
        raise Unsupported(refusal(explanation, kernel))
    run = BackwardPass.of(partial(attention, **options), inputs)
    return Bound(f"{OURS}:{chosen.key}", run)


def _prepare_decode(kernel: str, inputs: Inputs, **scales: Any) -> Bound:
    """A decoding step over a contiguous or paged cache, depending on the problem's op."""
    q, k, v = inputs.bshd
    options = _options(attention_decode, inputs) | scales
    if inputs.problem.page is not None:
        k, v, options["block_table"] = inputs.paged
    run = partial(attention_decode, q, k, v, inputs.seqlens_k, **options)
    return _of_kernel(kernel, run, lambda out: out.transpose(1, 2))


def _prepare_varlen(kernel: str, inputs: Inputs) -> Bound:
    q, k, v = (x[0] for x in inputs.bshd)
    options, ends = _options(attention_varlen, inputs), inputs.cu_seqlens
    if (products := quantize_of(kernel)) is not None:
        options["quantize"] = products
    run = partial(attention_varlen, q, k, v, ends, ends, **options)
    return replace(_of_kernel(kernel, run, _packed), quantize=products)


def _options(function: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """The keywords of a problem for a function. Raises Unsupported if the function lacks one."""
    options = {"causal": inputs.shape.causal, **inputs.keywords.ours}
    if options.keys() - inspect.signature(function).parameters:
        raise Unsupported(f"{function.__name__} has no {inputs.problem.option}")
    return options


def _packed(out: Any) -> Any:
    """(T, H, D) as (1, H, T, D)."""
    return out[None].transpose(1, 2)


def _of_kernel(
    kernel: str, run: Callable[..., Any], to_bhsd: Callable[[Any], Any] = lambda result: result
) -> Bound:
    """A serving call or a backward pass. A kernel that is given by name is run once, as a test."""
    name = f"{OURS}:{kernel}"
    if kernel == "auto":
        return Bound(name, run, to_bhsd)
    run = partial(run, kernel=kernel)
    try:
        run()
    except ValueError as error:
        raise Unsupported(str(error)) from None
    return Bound(name, run, to_bhsd, is_emulated="-simt" in kernel)


def _prepare_contiguous(inputs: Inputs) -> Bound:
    """The call without pages, to show the cost of pages."""
    unpaged = replace(inputs, problem=replace(inputs.problem, op="decode", page=None))
    return replace(_prepare_decode("auto", unpaged), name=f"{OURS}:contiguous")


def _prepare_fp8_cache(inputs: Inputs) -> Bound:
    """The call with an e4m3 cache, which has half the bytes and is rounded."""
    k_scale, v_scale = inputs.fp8_scales
    bound = _prepare_decode("auto", inputs.in_fp8, k_scale=k_scale, v_scale=v_scale)
    return replace(bound, name=f"{OURS}:{FP8_CACHE}", quantize=FP8_CACHE)


def _prepare_tokens(inputs: Inputs) -> Bound:
    """The call on tokens in 8 bits, which has 656 bytes for 1152 and is rounded."""
    q, cache = inputs.bshd[0], inputs.tokens
    options = {"block_table": inputs.paged.block_table, "kv_format": TOKENS}
    run = partial(attention_decode, q, cache, cache, inputs.seqlens_k, **options)
    bound = _of_kernel("auto", run, lambda out: out.transpose(1, 2))
    return replace(bound, name=f"{OURS}:{TOKENS}", quantize=TOKENS)


def _prepare_flash_mla(inputs: Inputs) -> Bound:
    """FlashMLA's dense decoding."""
    module = importlib.import_module("flash_mla")
    heads = inputs.shape.heads_q * inputs.shape.seqlen_q
    metadata, splits = module.get_mla_metadata(inputs.seqlens_k, heads, 1)
    pages = inputs.paged

    def run() -> Any:
        return module.flash_mla_with_kvcache(
            inputs.bshd[0],
            pages.k,
            pages.block_table,
            inputs.seqlens_k,
            inputs.problem.head_dim_v,
            metadata,
            splits,
            causal=inputs.shape.causal,
        )[0]

    return Bound("flash_mla", run, lambda out: out.transpose(1, 2))


def _prepare_each(inputs: Inputs) -> Bound:
    """One dense call per packed sequence, to show the cost of packing."""
    import torch

    lengths = [sequence.seqlen_q for sequence in inputs.problem.sequences]
    packed = (x.transpose(1, 2).split(lengths, dim=2) for x in inputs.bshd)
    if inputs.keywords.ours:  # may be made for other sizes
        raise Unsupported(f"is timed without {inputs.problem.option}")
    calls = [
        partial(attention, *operands, causal=inputs.shape.causal)
        for operands in zip(*packed, strict=True)
    ]
    return Bound(f"{OURS}:dense", lambda: [call() for call in calls], partial(torch.cat, dim=2))


def _torch_varlen() -> Callable[..., Any] | None:
    """PyTorch's FlashAttention of packed sequences, if this version of torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn  # type: ignore[no-any-return]


def _is_cuda(x: Any) -> bool:
    return bool(x.is_cuda)


def _prepare_torch_varlen(varlen_attn: Callable[..., Any], inputs: Inputs) -> Bound:
    """varlen_attn of packed sequences, or of pages; its keywords differ between versions."""
    if not _is_cuda(inputs.q):
        raise Unsupported("takes CUDA tensors alone")
    if inputs.keywords.ours:
        raise Unsupported(f"is timed without {inputs.problem.option}")
    known, causal = inspect.signature(varlen_attn).parameters, inputs.shape.causal
    options: dict[str, Any] = {}
    if inputs.shape.heads_q != inputs.shape.heads_kv and "enable_gqa" in known:
        options["enable_gqa"] = True
    if causal:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    q, k, v = (x.flatten(0, 1) for x in inputs.bshd)
    ends = ends_k = inputs.cu_seqlens
    if inputs.problem.op == "paged":
        if "block_table" not in known:
            raise Unsupported("this version takes no pages")
        k, v, options["block_table"] = inputs.paged
        options["seqused_k"], ends_k = inputs.seqlens_k, None
    longest_q = max(sequence.seqlen_q for sequence in inputs.problem.sequences)
    longest_k = max(sequence.seqlen_k for sequence in inputs.problem.sequences)
    run = partial(varlen_attn, q, k, v, ends, ends_k, longest_q, longest_k, **options)
    if inputs.problem.op == "paged":
        sizes = (inputs.shape.batch, inputs.shape.seqlen_q)
        return Bound("torch:varlen", run, lambda out: out.unflatten(0, sizes).transpose(1, 2))
    return Bound("torch:varlen", run, _packed)


def _prepare_torch(backend: str, inputs: Inputs) -> Bound:
    bound = prepare_torch(backend, inputs)
    if inputs.problem.op != "backward":
        return bound
    context, options = partial(torch_backend, backend), inputs.keywords.torch or {}
    call = partial(torch_attention, causal=inputs.shape.causal, **options)
    return Bound(bound.name, BackwardPass.of(call, inputs, context))


def _prepare_flex(inputs: Inputs) -> Bound:
    """FlexAttention by torch.compile, which takes seconds; the BlockMask is made before the timed
    call."""
    import torch

    if not _is_cuda(inputs.q):
        raise Unsupported("is timed on CUDA tensors alone")
    if (option := inputs.keywords.flex) is None:
        raise Unsupported(f"has no {inputs.problem.option}")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = inputs.shape
    offset = shape.seqlen_k - shape.seqlen_q
    mask_mod, block_mask = option.mask_mod, None
    if shape.causal:
        if mask_mod is not None:
            raise Unsupported(f"is timed without a causal mask with {inputs.problem.option}")
        mask_mod = lambda b, h, q, k: q + offset >= k  # noqa: E731
    if mask_mod is not None:
        batch = shape.batch if option.has_batch else None
        sizes = (shape.seqlen_q, shape.seqlen_k)
        block_mask = create_block_mask(mask_mod, batch, None, *sizes, device=inputs.q.device)
    # At its limit of 8 functions dynamo would continue without fusing.
    torch._dynamo.reset()
    call = partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=option.score_mod,
        block_mask=block_mask,
        enable_gqa=shape.heads_q != shape.heads_kv,
    )
    if inputs.problem.op == "backward":
        return Bound("torch:flex", BackwardPass.of(call, inputs))
    return Bound("torch:flex", partial(call, inputs.q, inputs.k, inputs.v))


def _first(result: Any) -> Any:
    """The output; some versions also return the log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result


def _prepare_flash_attn(module: ModuleType, inputs: Inputs) -> Bound:
    """FlashAttention 2, 3 and 4 share a signature: (B, S, H, D), causal bottom-right."""
    q, k, v = inputs.bshd
    function, causal = module.flash_attn_func, inputs.shape.causal
    return Bound(
        module.__name__,
        lambda: function(q, k, v, causal=causal),
        lambda result: _first(result).transpose(1, 2),
    )


def _prepare_xformers(module: ModuleType, inputs: Inputs) -> Bound:
    """(B, S, H, D); shared KV heads as (B, S, Hkv, group, D), K and V expanded without a copy."""
    shape, (q, k, v) = inputs.shape, inputs.bshd
    mask = None
    if shape.causal and shape.seqlen_q == shape.seqlen_k:
        mask = module.LowerTriangularMask()
    elif shape.causal:
        bias = importlib.import_module(f"{module.__name__}.fmha.attn_bias")
        mask = bias.LowerTriangularFromBottomRightMask()
    group = shape.heads_q // shape.heads_kv
    if group > 1:
        q = q.unflatten(2, (shape.heads_kv, group))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
    return Bound(
        "xformers",
        lambda: module.memory_efficient_attention(q, k, v, attn_bias=mask),
        lambda out: (out.flatten(2, 3) if group > 1 else out).transpose(1, 2),
    )


def _prepare_flashinfer(module: ModuleType, inputs: Inputs) -> Bound:
    """Its batched prefill on ragged operands, (B S, H, D); planned outside the timed call."""
    import torch

    shape, (q, k, v) = inputs.shape, inputs.bshd
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        starts * shape.seqlen_q,
        starts * shape.seqlen_k,
        shape.heads_q,
        shape.heads_kv,
        shape.head_dim,
        causal=shape.causal,
        q_data_type=q.dtype,
    )
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return Bound(
        "flashinfer",
        lambda: wrapper.run(q, k, v),
        lambda out: out.unflatten(0, (shape.batch, shape.seqlen_q)).transpose(1, 2),
    )


def _prepare_sageattention(module: ModuleType, inputs: Inputs) -> Bound:
    """(B, H, S, D); quantizes Q and K, so its error is beyond that of 16-bit attention."""
    q, k, v, shape = inputs.q, inputs.k, inputs.v, inputs.shape
    if shape.causal and shape.seqlen_q != shape.seqlen_k:
        raise Unsupported("takes a causal mask only for as many queries as keys")
    run = partial(module.sageattn, q, k, v, tensor_layout="HND", is_causal=shape.causal)
    return Bound("sageattention", run, _first)


def _prepare_peer(peer: _Peer, module: ModuleType, inputs: Inputs) -> Bound:
    if inputs.keywords.ours:
        raise Unsupported(f"is timed without {inputs.problem.option}")
    return peer.prepare(module, inputs)


@dataclass(frozen=True)
class _Peer:
    name: str
    module: str
    function: str  # function by which the module is recognised
    prepare: Callable[[ModuleType, Inputs], Bound]


_PEERS = (
    # FlashAttention 2, 3 and 4
    _Peer("flash_attn", "flash_attn", "flash_attn_func", _prepare_flash_attn),
    _Peer("flash_attn_interface", "flash_attn_interface", "flash_attn_func", _prepare_flash_attn),
    _Peer("flash_attn.cute", "flash_attn.cute", "flash_attn_func", _prepare_flash_attn),
    _Peer("xformers", "xformers.ops", "memory_efficient_attention", _prepare_xformers),
    _Peer("flashinfer", "flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", _prepare_flashinfer),
    _Peer("sageattention", "sageattention", "sageattn", _prepare_sageattention),
)
