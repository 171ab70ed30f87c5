"""Options of a call that are arrays, and dropout: checked, and as the library reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._call import DTYPES, Request, number

# An address for what is there but has no memory: no elements, or a tensor on torch's "meta" device,
# or a random state that is yet to be drawn. To the library a null address means "not given".
_NO_MEMORY = 1 << 60


class Options(NamedTuple):
    """None stands for an array that was not given; see `attention` for what they mean."""

    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    rng_state: Any = None

    def arrays(self) -> dict[str, Any]:
        """Those that were given, by name."""
        if self is NONE:
            return {}
        named = self._asdict()
        del named["dropout_p"]
        return {name: x for name, x in named.items() if x is not None}

    def with_random_state(self, lib: Any, q: Any) -> Options:
        """Draws the random state where there is dropout and none was given."""
        if self.dropout_p == 0.0 or self.rng_state is not None:
            return self
        return self._replace(rng_state=lib.random_state(q))

    def describe(self, lib: Any, request: Request) -> tuple[Any, ...] | None:
        """The tuple that `_C` reads, None without options. Raises ValueError for strides."""
        if self is NONE:
            return None
        shape = request.logits_shape
        bias, slopes, sinks, rng_state = self.bias, self.alibi_slopes, self.sinks, self.rng_state
        for name, x in (("alibi_slopes", slopes), ("sinks", sinks), ("rng_state", rng_state)):
            if x is not None and x.shape[-1] > 1 and lib.strides(x)[-1] != 1:
                raise ValueError(
                    f"the last dimension of {name} must be contiguous (stride 1), got stride "
                    f"{lib.strides(x)[-1]}; call .contiguous() first"
                )
        per_batch = slopes is not None and len(slopes.shape) == 2
        return (
            _address(lib, bias),
            _broadcast_strides(lib, bias, shape),
            request.dtype if bias is None else lib.DTYPES[bias.dtype],
            _address(lib, self.mask),
            _broadcast_strides(lib, self.mask, shape),
            _address(lib, slopes),
            lib.strides(slopes)[0] if per_batch else 0,
            _address(lib, sinks),
            self.dropout_p,
            (_address(lib, rng_state) or _NO_MEMORY) if self.dropout_p else 0,
        )


NONE = Options()  # of a call with none of them


def make_options(
    lib: Any,
    request: Request,
    q: Any,
    bias: Any,
    mask: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: float,
    rng_state: Any,
) -> Options:
    """Checks kinds, shapes, dtypes and devices. Raises ValueError, TypeError."""
    if bias is mask is alibi_slopes is sinks is rng_state is None and dropout_p == 0.0:
        return NONE
    probability = number("dropout_p", dropout_p)
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, allowed: a probability, 0 to 1")
    options = Options(bias, mask, alibi_slopes, sinks, probability, rng_state)
    for name, x in options.arrays().items():
        if not isinstance(x, lib.ARRAY):
            kind = type(x)
            raise TypeError(
                f"{name} must be an array of the same library as q, "
                f"got {kind.__module__}.{kind.__qualname__}"
            )
        if getattr(x, "device", None) != getattr(q, "device", None):
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")

    float32, boolean, integers = lib.OPTION_DTYPES
    if bias is not None:
        _check_broadcast("bias", bias, request.logits_shape)
        if bias.dtype not in (q.dtype, float32):
            like_q = DTYPES[request.dtype]
            allowed = "float32 like q" if like_q == "float32" else f"{like_q} like q, or float32"
            raise ValueError(f"bias must be {allowed}, got {bias.dtype}")
    if mask is not None:
        _check_broadcast("mask", mask, request.logits_shape)
        _check_dtype("mask", mask, (boolean,), "bool, True where a query sees a key")
    heads = request.num_heads_q
    if alibi_slopes is not None:
        if tuple(alibi_slopes.shape) not in ((heads,), (request.batch, heads)):
            raise ValueError(
                f"alibi_slopes must have shape (num_heads_q,) = {(heads,)} or (batch, num_heads_q) "
                f"= {(request.batch, heads)}, got {tuple(alibi_slopes.shape)}"
            )
        _check_dtype("alibi_slopes", alibi_slopes, (float32,), "float32")
    if sinks is not None:
        if tuple(sinks.shape) != (heads,):
            raise ValueError(
                f"sinks must have shape (num_heads_q,) = {(heads,)}, got {tuple(sinks.shape)}"
            )
        _check_dtype("sinks", sinks, (float32,), "float32")
    if rng_state is not None:
        if tuple(rng_state.shape) != (2,):
            raise ValueError(
                "rng_state must have shape (2,), a seed and an offset, "
                f"got {tuple(rng_state.shape)}"
            )
        _check_dtype("rng_state", rng_state, integers, "int64 or uint64")
    return options


def _check_broadcast(name: str, x: Any, shape: tuple[int, ...]) -> None:
    given = tuple(x.shape)
    fits = all(size in (1, whole) for size, whole in zip(given[::-1], shape[::-1]))
    if not 1 <= len(given) <= 4 or not fits:
        raise ValueError(
            f"{name} must have 1 to 4 dimensions that broadcast to (batch, num_heads_q, seqlen_q, "
            f"seqlen_k) = {shape}, got shape {given}"
        )


def _check_dtype(name: str, x: Any, dtypes: tuple[Any, ...], kind: str) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {kind}, got {x.dtype}")


def _address(lib: Any, x: Any) -> int:
    return 0 if x is None else lib.address(x) or _NO_MEMORY


def _broadcast_strides(lib: Any, x: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, that read x as if it were expanded to the 4 dimensions of `shape`."""
    if x is None:
        return (0, 0, 0, 0)
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape, lib.strides(x)))
    return (0,) * (len(shape) - len(x.shape)) + tuple(strides)
