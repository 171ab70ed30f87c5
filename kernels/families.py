"""Makes a kernel of what manifest.toml says of it and of its family.

Its name, C++ type, arguments, options and conditions on a call follow from its values on the axes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from manifest_rows import (
    ARCHS,
    BACKWARD_OPTIONS,
    COMPILED_OPTIONS,
    OPTIONS,
    ROW_FIELDS,
    TERMS,
    Kernel,
    ManifestError,
    choose,
    compositions,
)


@dataclass(frozen=True)
class Value:
    """What a value on an axis adds to a kernel."""

    name: str = ""  # a word of its name
    type: dict[str, str] = field(default_factory=dict)  # template arguments, by placeholder
    params: str = ""  # a part of its params' name, where the placeholder names the axis
    options: tuple[str, ...] = ()  # options that it implements
    needs: tuple[str, ...] = ()  # options that a call has to ask for
    terms: tuple[str, ...] = ()  # terms in addition to its family's


# The axes in the order of their words in a kernel's name. The first value of each is the default,
# whose template arguments equal the C++ defaults.
AXES: dict[str, dict[str | bool, Value]] = {
    "accumulate": {
        "fp32": Value(type={"qk": "float", "pv": "float"}),
        "fp16_qk": Value("fp16_qk", type={"qk": "cutlass::half_t", "pv": "float"}),
        "fp16_pv": Value("fp16_pv", type={"pv": "cutlass::half_t"}),
        "fp16": Value("fp16", type={"qk": "cutlass::half_t", "pv": "cutlass::half_t"}),
    },
    "quantize": {
        "none": Value(),
        "qk": Value("int8_qk", type={"qk": "int32_t"}, params="Quantized"),
        "int8": Value("int8", type={"qk": "int32_t", "pv": "int32_t"}, params="QuantizedValues"),
        "fp8": Value(
            "int8_fp8", type={"qk": "int32_t", "pv": "cutlass::half_t"}, params="Fp8Values"
        ),
    },
    "layout": {
        "dense": Value(type={"layout": "RowLayout::kDense", "seq_info": "DenseSeqInfo"}),
        "varlen": Value(
            "varlen",
            type={"layout": "RowLayout::kVarlen", "seq_info": "VarlenSeqInfo"},
            params="Varlen",
            options=("varlen",),
        ),
        "paged": Value(
            "paged",
            type={"layout": "RowLayout::kPaged"},
            params="Paged",
            options=("varlen", "paged_kv"),
        ),
    },
    "kv": {
        "same": Value(type={"kv": "{element}"}),
        "fp8": Value("fp8", type={"kv": "E4M3"}, options=("fp8_kv",), needs=("fp8_kv",)),
        "ds_mla": Value("ds_mla", {"kv": "DsMla"}, options=("ds_mla",), needs=("ds_mla",)),
        "ds_mla_v4": Value(
            "ds_mla_v4", {"kv": "DsMlaV4"}, options=("ds_mla_v4",), needs=("ds_mla_v4",)
        ),
    },
    "latent": {
        False: Value(),
        True: Value("latent", options=("latent_kv",), needs=("latent_kv",)),
    },
    "bias": {
        False: Value(type={"bias": "false"}),
        True: Value("bias", type={"bias": "true"}, params="Bias", needs=("bias",), terms=("bias",)),
        "pairs": Value("with_bias", needs=("bias",), terms=("pairbias",)),
    },
    "mask": {
        False: Value(type={"mask": "false"}),
        True: Value("mask", type={"mask": "true"}, params="Mask", needs=("mask",), terms=("mask",)),
        "pairs": Value("mask", needs=("mask",), terms=("pairmask",)),
    },
    "bias_grad": {
        False: Value(type={"bias_grad": "false"}),
        True: Value(
            "bias", {"bias_grad": "true"}, "Grad", options=("bias_grad",), needs=("bias_grad",)
        ),
    },
    "dropout": {
        False: Value(type={"dropout": "false"}),
        True: Value("dropout", {"dropout": "true"}, options=("dropout",), needs=("dropout",)),
    },
    "limited": {
        False: Value(),
        True: Value("limited", options=("max_error",), needs=("max_error",)),
    },
    # Whether the only score is the general one: follows from `scores`.
    "general": {
        False: Value(type={"general": "false"}),
        True: Value("general", type={"general": "true"}),
    },
    "ordered": {
        False: Value(type={"ordered": "false"}),
        True: Value("ordered", type={"ordered": "true"}, options=("deterministic",)),
    },
}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
ALL_OPTIONS = ["all"]
ALIGNMENT = 16  # bytes of a copy


@dataclass
class Settings:
    """What manifest.toml says of a kernel and of its family; its first lines explain each."""

    type: str = ""
    function: str = ""
    include: str = ""
    params: str = Kernel.params
    params_include: str = Kernel.params_include
    stem: str = ""
    name: str = ""
    arch: str = ""
    scores: list = field(default_factory=list)
    terms: list = field(default_factory=list)
    core_scores: list = field(default_factory=list)
    options: list = field(default_factory=list)
    entry_names: str = "cutlass"
    alignment: int = 0
    automatic: bool = True
    max_rows: int = 0
    avoids: list = field(default_factory=list)
    axes: dict[str, str | bool] = field(default_factory=DEFAULTS.copy)

    @property
    def namespace(self) -> str:
        return (self.type or self.function).partition("::")[0]

    @property
    def class_name(self) -> str:
        """In the form of a file name: split_keys for sm90::SplitKeys."""
        code = (self.type or self.function).partition("<")[0].rpartition("::")[2]
        return re.sub(r"\B([A-Z])", r"_\1", code).lower().removeprefix("attention_")

    @property
    def values(self) -> list[Value]:
        return [AXES[axis][value] for axis, value in self.axes.items()]


def kernel_of(settings: Settings, all_scores: dict[str, str], where: str) -> Kernel:
    """Raises ManifestError, whose message begins with `where`."""
    needs = _needs(settings)
    scores = _scores(settings, all_scores, needs, where)
    settings.axes["general"] = list(scores) == ["general"]
    is_cuda = bool(settings.type)
    op = "backward" if settings.class_name.startswith("backward") else "forward"
    _check_placeholders("params", settings.params, list(AXES), where)
    alignment = _alignment(settings, op)
    arch = _arch(settings)
    return Kernel(
        name=settings.name or _name(settings, arch),
        device="cuda" if is_cuda else "cpu",
        include=settings.include or f"{settings.namespace}/{settings.class_name}.hpp",
        code=_code(settings, where),
        scores=scores if is_cuda else {},
        core_scores=_core_scores(settings, list(scores), where),
        options=_options(settings, list(scores), op, where),
        needs=needs,
        pairs=_pairs(settings),
        op=op,
        asides=is_cuda and (op == "backward" or _has_launch_before(settings.axes)),
        arch=arch,
        params=settings.params.format_map(
            {axis: AXES[axis][value].params for axis, value in settings.axes.items()}
        ),
        params_include=settings.params_include,
        alignment=alignment,
        head_dim_multiple=_head_dim_multiple(settings, alignment),
        automatic=settings.automatic,
        max_rows=settings.max_rows,
        accumulate=str(settings.axes["accumulate"]),
        quantize=str(settings.axes["quantize"]),
        tma=settings.namespace == "sm90",
        scalar=settings.namespace == "scalar",
        avoids=tuple(settings.avoids),
        entry_names=settings.entry_names,
    )


def _has_launch_before(axes: dict[str, str | bool]) -> bool:
    return axes["quantize"] != "none" or axes["mask"] is True


def _scores(
    settings: Settings, all_scores: dict[str, str], needs: tuple[str, ...], where: str
) -> dict[str, str]:
    terms = [*settings.terms, *(term for value in settings.values for term in value.terms)]
    for term in terms:
        choose(term, TERMS, "terms", where)
    if terms:
        all_scores = compositions(terms, list(needs))
    for score in settings.scores:
        choose(score, all_scores, "scores", where)
    return {score: all_scores[score] for score in settings.scores or all_scores}


def _core_scores(settings: Settings, scores: list[str], where: str) -> tuple[str, ...]:
    given = settings.core_scores
    if given != scores[: len(given)]:
        raise ManifestError(
            f"{where}: core_scores is {given!r}; allowed: the first of {', '.join(scores)}"
        )
    return tuple(given or scores)


def _needs(settings: Settings) -> tuple[str, ...]:
    needs = [option for value in settings.values for option in value.needs]
    if settings.type and settings.axes["quantize"] != "none":
        # Dense keys are rounded by DenseKeyTiles alone (sm80/key_tiles.hpp).
        needs += ["varlen"] * (settings.axes["layout"] == "varlen")
    if settings.namespace == "sm90" and settings.axes["layout"] == "paged":
        needs += ["paged_kv"]  # TMA's boxes are rows of a page
    return tuple(needs)


def _pairs(settings: Settings) -> tuple[str, ...]:
    """A bias that TMA does not copy, and a mask without a map."""
    read_in_pairs = {
        "bias": settings.axes["bias"] == "pairs"
        or (settings.axes["bias"] and settings.namespace != "sm90"),
        "mask": settings.axes["mask"] == "pairs",
    }
    return tuple(option for option, is_read in read_in_pairs.items() if is_read)


def _options(settings: Settings, scores: list[str], op: str, where: str) -> tuple[str, ...]:
    """The options that its scores and axes imply, and those that the manifest adds."""
    known = [x for x in OPTIONS if op == "backward" or x not in BACKWARD_OPTIONS]
    if settings.options == ALL_OPTIONS:
        return tuple(x for x in known if x not in COMPILED_OPTIONS)
    # Scores decide about the options that change a logit; every kernel implements sinks.
    of_scores = [option for option in known if OPTIONS[option]]
    others = [x for x in known if x not in (*of_scores, "sinks")]
    for option in settings.options:
        choose(option, [*others, *ALL_OPTIONS], "options", where)
    parts = {part for score in scores for part in score.split("_")}
    implemented = {option for option in of_scores if parts.intersection(OPTIONS[option])}
    implemented |= {option for value in settings.values for option in value.options}
    implemented |= {"sinks", *settings.options}
    return tuple(option for option in known if option in implemented)


def _alignment(settings: Settings, op: str) -> int:
    if settings.alignment or settings.function:
        return settings.alignment or 1
    if settings.axes["general"] and op == "forward" and settings.axes["layout"] != "paged":
        return 2  # the kernel of the general score copies elements where 16 bytes are not aligned
    return ALIGNMENT


def _head_dim_multiple(settings: Settings, alignment: int) -> int:
    if "{head_dim}" not in settings.type:
        return 0
    return 1 if alignment == 1 else ALIGNMENT // (1 if settings.axes["kv"] == "fp8" else 2)


def _arch(settings: Settings) -> str:
    if settings.arch or settings.function:
        return settings.arch
    if settings.axes["quantize"] == "fp8":
        return "89"  # whose tensor cores multiply e4m3
    return "90a" if settings.namespace == "sm90" else "80"


def _name(settings: Settings, arch: str) -> str:
    """Such as sm80/paged_general: arch of tensor cores or namespace, then class and axes."""
    is_of_arch = settings.namespace in {f"sm{arch.rstrip('a')}" for arch in ARCHS}
    folder = f"sm{arch.rstrip('a')}" if is_of_arch else settings.namespace
    parts = [AXES[axis][value].name for axis, value in settings.axes.items()]
    stem = settings.stem or settings.class_name
    if stem not in ("forward", *parts):
        parts.insert(0, stem)
    return "/".join(filter(None, [folder, "_".join(filter(None, parts))]))


def _code(settings: Settings, where: str) -> str:
    """The type with the axes' arguments filled in, without trailing defaults; or the function."""
    name, opened, arguments = settings.type.removesuffix(">").partition("<")
    if not opened:
        return settings.type or settings.function
    defaults = {k: v for axis in AXES for k, v in AXES[axis][DEFAULTS[axis]].type.items()}
    chosen = {axis: value for axis, value in settings.axes.items() if value != DEFAULTS[axis]}
    given = {k: v for axis, value in chosen.items() for k, v in AXES[axis][value].type.items()}
    listed = arguments.split(", ")
    _check_placeholders("type", arguments, [*ROW_FIELDS, *defaults], where)
    while (last := listed[-1][1:-1]) in defaults and last not in given:
        listed.pop()
    filled = ((defaults | given).get(x[1:-1], x) if x.startswith("{") else x for x in listed)
    return f"{name}<{', '.join(filled)}>"


def _check_placeholders(name: str, text: str, allowed: list[str], where: str) -> None:
    for placeholder in re.findall(r"{(.*?)}", text):
        choose(placeholder, allowed, f"a placeholder of {name}", where)
