"""`attention` with score_mod, mask_mod or block_mask.

They are translated to other options where possible. A score_mod that no option expresses is
compiled into a GPU kernel, or evaluated by torch on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from ._call import batch_dims, torch_library
from ._call.call import MODS, PADDING, Call
from ._call.foreign import converted
from ._call.keywords import refusal, refuse_nested
from ._mods import interpreter, transforms
from ._mods.block_mask import check
from ._mods.graph import Graph
from ._mods.masks import Interval, Lengths
from ._mods.translate import Mods, Translated, translate

_OF_LOGITS = ("softcap", "alibi_slopes", "bias")
_OF_KEYS = ("bias", "alibi_slopes", "quantize")  # depend on the number of keys
_INTERVALS = ("causal", "window", "attention_chunk")
# Options that combine with a score_mod that torch evaluates on a CPU.
_INTERPRETED = {
    *("softmax_scale", "causal", "window", "attention_chunk", "mask", "sinks"),
    *("layout", "return_lse", "out", "deterministic", "kernel", "accumulate", "verify"),
}
# And options with which a score_mod runs on fast kernels.
_COMPILED = {"softmax_scale", "causal", "window", "mask", "layout", "return_lse"}


def are_in(options: dict[str, Any]) -> bool:
    return any(options.get(name) is not None for name in MODS)


def without(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in MODS}


def attention(function: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The result of attention() with score_mod, mask_mod or block_mask among `options`.

    `function` is attention() itself, called again with the options they are translated to.
    """
    if unknown := refusal("attention", options):
        raise unknown
    given = {"q": q, "k": k, "v": v, **without(options)}
    if arrays := converted(given):
        given |= arrays
    mods = {name: options.get(name) for name in MODS}
    if not are_in(options):
        return function(**given)
    refuse_nested(given["q"], {name: None for name, x in mods.items() if x is not None})
    if batch_dims.are_several(given["q"]):
        q, k, v = (given.pop(name) for name in "qkv")
        return batch_dims.attention(function, q, k, v, {**given, **mods})
    return _compute(function, given, mods)


def explained(call: Call, can_compile: bool) -> tuple[Call, Graph | None]:
    """The translated call for `explain`, and the graph of a score_mod that no option expresses.

    `can_compile`: the call would run on a GPU, and NVRTC can compile for it. Raises the errors of
    `options_of`.
    """
    mods = {name: call.options.get(name) for name in MODS}
    is_modified = are_in(call.options)
    call = Call(call.q, call.k, call.v, without(call.options))
    if not is_modified:
        return call, None
    call, found = options_of(call, mods, can_compile)
    return call, found.score


def options_of(
    call: Call, mods: dict[str, Any], can_compile: bool | None = None
) -> tuple[Call, Translated]:
    """The call with its mods translated to options, and the translation.

    `can_compile`: whether kernels can be compiled where the call would run; None asks for the
    device of q.

    Raises:
        TypeError: an operand is not a torch tensor, or a function has wrong arguments.
        ValueError: a mod contradicts an option, or does not fit the sizes of the call.
    """
    named = " and ".join(name for name, x in mods.items() if x is not None)
    if not isinstance(call.q, torch.Tensor):
        raise TypeError(
            f"q is a {type(call.q).__name__}, allowed for a call with {named}: torch.Tensor"
        )
    options = dict(call.options)
    facts = _facts(call)  # checks the arguments
    if mods["score_mod"] is not None:
        for name in _OF_LOGITS:
            x = options.get(name)
            if x is not None and not (isinstance(x, (int, float)) and x == 0):
                raise ValueError(
                    f"score_mod and {name} are both given; allowed: one of them. A score_mod "
                    f"receives softmax_scale * q.k and can apply {name} itself"
                )
        if options.get("return_max_logit"):
            raise ValueError(
                "score_mod and return_max_logit are both given; allowed: one of them. Terms of a "
                "score_mod that do not change the softmax are not computed"
            )
    batch, heads = call.q.shape[0], facts.num_heads_q
    lengths = Lengths(batch, heads, facts.seqlen_q, facts.seqlen_k)
    if mods["block_mask"] is not None:
        check(mods["block_mask"], lengths, call.q.device)
    found = translate(
        call.q,
        lengths,
        Mods(**mods),
        given=_interval(options, facts.seqlen_k - facts.seqlen_q),
        has_sinks=options.get("sinks") is not None,
        may_cut=all(options.get(x) is None for x in _OF_KEYS),
        may_compile=_COMPILED.issuperset(
            name for name, x in options.items() if x is not None and x is not False
        )
        and compiles_well(call.q, call.k, call.v, can_compile=can_compile),
    )
    if found.scale != 1.0:
        options["softmax_scale"] = _scale(call) * found.scale
    of_mods = dict(found.options)
    # Lengths change the positions that masks and slopes count; mods count from row 0.
    become = " and ".join(name for name in of_mods if name != "softcap")
    for name in PADDING:
        if become and options.get(name) is not None:
            raise ValueError(
                f"{name} is given with {named}, which is computed as {become}; allowed: one of "
                "them, padding in mask_mod"
            )
    if options.get("mask") is not None and "mask" in of_mods:
        of_mods["mask"] = of_mods["mask"] & options["mask"][..., : found.keys]
    elif options.get("mask") is not None and options["mask"].shape[-1] > found.keys:
        of_mods["mask"] = options["mask"][..., : found.keys]
    rows = 1 if facts.bshd else 2
    k, v = (x.narrow(rows, 0, found.keys) for x in (call.k, call.v))
    return Call(call.q, k, v, {**options, **of_mods}), found


def _facts(call: Call) -> _C.Call:
    """As `call.facts()`, which reads addresses that tensors of torch.func do not have."""
    if not transforms.are_active():
        return call.facts()

    def stand_in(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    with transforms.outside():
        q, k, v = (stand_in(x) for x in (call.q, call.k, call.v))
        options = {name: stand_in(x) for name, x in call.options.items()}
        return Call(q, k, v, options).facts()


def _interval(options: dict[str, Any], offset: int) -> Interval | None:
    """The keys that the call's own causal mask, window and chunk leave, if it has one of them."""
    if all(options.get(x) in (None, False) for x in _INTERVALS):
        return None
    left, right = _window(options)
    if options.get("causal"):
        right = 0
    return Interval(
        None if left is None else offset - left,
        None if right is None else offset + right,
        options.get("attention_chunk"),
    )


def _window(options: dict[str, Any]) -> tuple[int | None, int | None]:
    window = options.get("window")
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    left, right = (None if x is None or x == -1 else int(x) for x in sides)
    return left, right


def _scale(call: Call) -> float:
    scale = call.options.get("softmax_scale")
    return 1 / math.sqrt(call.q.shape[-1]) if scale is None else float(scale)


# torch.compile must break its graph here: it would trace the tracer.
@torch.compiler.disable
def _compute(function: Callable[..., Any], given: dict[str, Any], mods: dict[str, Any]) -> Any:
    operands = (given.pop(name, None) for name in ("q", "k", "v", "bias"))
    q, k, v, bias = torch_library.autocast(*operands)
    options = given if bias is None else {**given, "bias": bias}
    call, found = options_of(Call(q, k, v, options), mods)
    with torch_library.autocast_off(q.device.type):
        if found.score is not None:
            return computed(call, found.score)
        result = function(call.q, call.k, call.v, **call.options)
    if not isinstance(result, tuple):
        return result
    out, *more = result
    if call.options.get("return_lse"):
        more[0] = more[0] + found.lse_shift
    return (out, *more)


def compiles_well(*operands: torch.Tensor, can_compile: bool | None = None) -> bool:
    """Whether fast kernels can be compiled with a score_mod for these q, k and v."""
    if operands[0].dtype == torch.float32 or transforms.are_active():
        return False
    for x in operands:
        sizes = [x.shape[-1], x.storage_offset(), *x.stride()[:-1]]
        if x.shape[-1] > 256 or x.stride(-1) != 1 or any(size % 8 for size in sizes):
            return False
    if can_compile is None:
        from . import jit

        device = operands[0].device
        can_compile = device.type == "cuda" and not jit.available(device.index)
    return can_compile


def computed(call: Call, score: Graph) -> Any:
    """The result of a call with a score_mod that no other option expresses."""
    transforms.refuse_score()
    compute = _interpreted if call.q.device.type == "cpu" else _on_gpu
    out, lse = compute(call, score)
    if call.options.get("out") is not None:
        out = torch_library.copied(out, call.options["out"])
    return (out, lse) if call.options.get("return_lse") else out


def _on_gpu(call: Call, score: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    if call.options.get("verify"):
        raise ValueError(
            "verify=True: no scalar kernel can run this score_mod, which no other option "
            "expresses; compare with the call on a CPU, which torch evaluates"
        )
    from . import _compiled  # imports jit

    return _compiled.attention(call, score)


def _interpreted(call: Call, score: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    options = call.options
    for name, x in options.items():
        is_tensor = isinstance(x, torch.Tensor)
        if name not in _INTERPRETED and (is_tensor or x not in (None, False, 0, 0.0)):
            # Lists and ints have become tensors by now.
            given = "given" if is_tensor else repr(x)
            raise ValueError(
                f"{name} is {given}, but torch evaluates this score_mod on a CPU; allowed with it: "
                f"{', '.join(sorted(_INTERPRETED - {'verify'}))}"
            )
    if options.get("kernel", "auto") not in ("auto", "cpu"):
        raise ValueError(
            f"kernel is {options['kernel']!r}, but torch evaluates this score_mod; allowed: "
            '"auto", "cpu"'
        )
    if options.get("verify"):
        raise ValueError(
            "verify=True: torch evaluates this score_mod on a CPU, and there is no second kernel "
            "to compare with"
        )
    facts = call.facts()
    is_bshd = facts.bshd
    q, k, v = (x.transpose(1, 2) if is_bshd else x for x in (call.q, call.k, call.v))
    mask = options.get("mask")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    sinks = options.get("sinks")
    own = interpreter.Options(
        softmax_scale=_scale(call),
        offset=k.shape[2] - q.shape[2],
        causal=bool(options.get("causal", False)),
        window=_window(options),
        attention_chunk=options.get("attention_chunk"),
        mask=mask,
    )
    out, lse = interpreter.attention(q, k, v, score, own, sinks)
    return (out.transpose(1, 2).contiguous() if is_bshd else out), lse
