"""Makes a kernel from its entry in manifest.toml and the entry of its family.

Its name, C++ type, arguments, options and conditions on a call follow from its values on the axes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from manifest_rows import (
    ARCHS,
    BACKWARD_OPTIONS,
    COMPILED_OPTIONS,
    DIM_FIELDS,
    OPTIONS,
    ROW_FIELDS,
    TERMS,
    TILE_FIELDS,
    Kernel,
    ManifestError,
    choose,
    compositions,
)


@dataclass(frozen=True)
class Value:
    """Contribution of a value on an axis to a kernel."""

    name: str = ""  # a word of the kernel's name
    trait: str = ""  # an option of kernels/core/traits.hpp
    params: str = ""  # part of the params' name, filled in for the axis' placeholder
    options: tuple[str, ...] = ()  # options that it implements
    needs: tuple[str, ...] = ()  # options that a call must use
    terms: tuple[str, ...] = ()  # terms in addition to its family's
    covers: tuple[str, ...] = ()  # terms of its family that are part of its own


# The axes in the order of their words in a kernel's name. The first value of each is the default.
AXES: dict[str, dict[str | bool, Value]] = {
    "accumulate": {
        "fp32": Value(),
        "fp16_qk": Value("fp16_qk", "with::Accumulators<cutlass::half_t, float>"),
        "fp16_pv": Value("fp16_pv", "with::Accumulators<float, cutlass::half_t>"),
        "fp16": Value("fp16", "with::Accumulators<cutlass::half_t, cutlass::half_t>"),
    },
    "quantize": {
        "none": Value(),
        "qk": Value("int8_qk", "with::Accumulators<int32_t, float>", "Quantized"),
        "int8": Value("int8", "with::Accumulators<int32_t, int32_t>", "QuantizedValues"),
        "fp8": Value("int8_fp8", "with::Accumulators<int32_t, cutlass::half_t>", "Fp8Values"),
    },
    "layout": {
        "dense": Value(),
        "varlen": Value("varlen", "with::PackedRows", "Varlen", options=("varlen",)),
        "paged": Value("paged", "with::Pages", "Paged", options=("varlen", "paged_kv")),
    },
    "kv": {
        "same": Value(),
        "fp8": Value("fp8", "with::StoredAs<E4M3>", options=("fp8_kv",), needs=("fp8_kv",)),
        "ds_mla": Value("ds_mla", "with::StoredAs<DsMla>", options=("ds_mla",), needs=("ds_mla",)),
        "ds_mla_v4": Value(
            "ds_mla_v4",
            "with::StoredAs<DsMlaV4>",
            options=("ds_mla_v4",),
            needs=("ds_mla_v4",),
        ),
    },
    "latent": {
        False: Value(),
        True: Value(options=("latent_kv",), needs=("latent_kv",)),
    },
    "bias": {
        False: Value(),
        True: Value("bias", "with::Bias", "Bias", needs=("bias",), terms=("bias",)),
        "any": Value("any_bias", "with::AnyBias", "Bias", needs=("bias",), terms=("bias",)),
        "pairs": Value("bias", needs=("bias",), terms=("pairbias",)),
    },
    "mask": {
        False: Value(),
        True: Value(  # chunks are part of the mask's map
            "mask", "with::Mask", "Mask", needs=("mask",), terms=("mask",), covers=("chunk",)
        ),
        "pairs": Value("mask", needs=("mask",), terms=("pairmask",)),
    },
    "max_logit": {
        False: Value(),
        True: Value("max_logit", needs=("return_max_logit",), terms=("maxlogit",)),
    },
    "bias_grad": {
        False: Value(),
        True: Value(
            "bias_grad", "with::BiasGrad", "Grad", options=("bias_grad",), needs=("bias_grad",)
        ),
    },
    "dropout": {
        False: Value(),
        True: Value("dropout", "with::Dropout", options=("dropout",), needs=("dropout",)),
    },
    "limited": {
        False: Value(),
        True: Value("limited", options=("max_error",), needs=("max_error",)),
    },
    # Whether the only score is the general one: follows from `scores`.
    "general": {
        False: Value(),
        True: Value("general"),
    },
    "ordered": {
        False: Value(),
        True: Value("ordered", "with::FixedOrder", options=("deterministic",)),
    },
}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
ALL_OPTIONS = ["all"]
ALIGNMENT = 16  # bytes of a copy


@dataclass
class Settings:
    """Settings of a kernel and its family; the first lines of manifest.toml explain each."""

    type: str = ""
    traits: list = field(default_factory=list)
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
    def is_backward(self) -> bool:
        return self.class_name.startswith("backward")

    @property
    def values(self) -> list[Value]:
        return [AXES[axis][value] for axis, value in self.axes.items()]


def kernel_of(settings: Settings, all_scores: dict[str, str], where: str) -> Kernel:
    """Raises ManifestError, whose message begins with `where`."""
    needs = _needs(settings)
    scores = _scores(settings, all_scores, needs, where)
    settings.axes["general"] = list(scores) == ["general"]
    is_cuda = bool(settings.type)
    op = "backward" if settings.is_backward else "forward"
    _check_placeholders("params", settings.params, list(AXES), where)
    alignment = _alignment(settings, op)
    arch = _arch(settings)
    return Kernel(
        name=settings.name or _name(settings, arch),
        device="cuda" if is_cuda else "cpu",
        include=settings.include or f"{settings.namespace}/{settings.class_name}.hpp",
        code=_code(settings, op, where),
        scores=scores if is_cuda else {},
        core_scores=_core_scores(settings, list(scores), where),
        options=_options(settings, list(scores), op, where),
        needs=needs,
        pairs=_pairs(settings),
        op=op,
        pre_post=is_cuda and (op == "backward" or _has_pre_post(settings)),
        arch=arch,
        params=settings.params.format_map(
            {axis: AXES[axis][value].params for axis, value in settings.axes.items()}
        ),
        params_include=settings.params_include,
        alignment=alignment,
        head_dim_multiple=_head_dim_multiple(settings, alignment),
        automatic=settings.automatic,
        accumulate=str(settings.axes["accumulate"]),
        quantize=str(settings.axes["quantize"]),
        # The kernels for latents copy by TMA only where that can.
        tma=settings.namespace == "sm90" and not settings.axes["latent"],
        scalar=settings.namespace == "scalar",
        avoids=tuple(settings.avoids),
        entry_names=settings.entry_names,
    )


def _has_pre_post(settings: Settings) -> bool:
    """Whether a forward kernel rounds K or maps a mask before it, or merges splits after it."""
    axes = settings.axes
    return axes["quantize"] != "none" or axes["mask"] is True or settings.class_name == "latent"


def _scores(
    settings: Settings, all_scores: dict[str, str], needs: tuple[str, ...], where: str
) -> dict[str, str]:
    terms = [*settings.terms, *(term for value in settings.values for term in value.terms)]
    for term in terms:
        choose(term, TERMS, "terms", where)
    covered = {term for value in settings.values for term in value.covers}
    terms = [term for term in terms if term not in covered]
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
        # Dense keys are rounded by DenseKeyTiles only (quantized/key_tiles.hpp).
        needs += ["varlen"] * (settings.axes["layout"] == "varlen")
    if settings.namespace == "sm90" and settings.axes["layout"] == "paged":
        needs += ["paged_kv"]  # TMA boxes are rows of a page
    return tuple(needs)


def _pairs(settings: Settings) -> tuple[str, ...]:
    """Options read in pairs: a bias that TMA does not copy, and a mask without a map."""
    read_in_pairs = {
        "bias": settings.axes["bias"] == "pairs"
        or (settings.axes["bias"] is True and settings.namespace != "sm90"),
        "mask": settings.axes["mask"] == "pairs",
    }
    return tuple(option for option, is_read in read_in_pairs.items() if is_read)


def _options(settings: Settings, scores: list[str], op: str, where: str) -> tuple[str, ...]:
    """Options implied by the scores and the axes, and options added by the manifest."""
    known = [x for x in OPTIONS if op == "backward" or x not in BACKWARD_OPTIONS]
    if settings.options == ALL_OPTIONS:
        return tuple(x for x in known if x not in COMPILED_OPTIONS)
    # Scores imply the options that change a logit; every kernel implements sinks.
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
        return 2  # the kernel of the general score copies unaligned calls element by element
    return ALIGNMENT


def _head_dim_multiple(settings: Settings, alignment: int) -> int:
    if settings.function or ("<" in settings.type and "{head_dim}" not in settings.type):
        return 0
    return 1 if alignment == 1 else ALIGNMENT // (1 if settings.axes["kv"] == "fp8" else 2)


def _arch(settings: Settings) -> str:
    if settings.arch or settings.function:
        return settings.arch
    if settings.axes["quantize"] == "fp8":
        return "89"  # its tensor cores multiply e4m3
    return "90a" if settings.namespace == "sm90" else "80"


def _name(settings: Settings, arch: str) -> str:
    """Such as sm80/paged_general: the tensor cores' arch or the namespace, then class and axes."""
    is_of_arch = settings.namespace in {f"sm{arch.rstrip('a')}" for arch in ARCHS}
    folder = f"sm{arch.rstrip('a')}" if is_of_arch else settings.namespace
    words = {axis: AXES[axis][value].name for axis, value in settings.axes.items()}
    # A backward kernel that reads the bias is "with_bias", unless it also has the bias' gradient.
    if settings.is_backward and settings.axes["bias"]:
        words["bias"] = "" if settings.axes["bias_grad"] else "with_bias"
    parts = list(words.values())
    stem = settings.stem or settings.class_name
    if stem not in ("forward", *parts):
        parts.insert(0, stem)
    return "/".join(filter(None, [folder, "_".join(filter(None, parts))]))


def _code(settings: Settings, op: str, where: str) -> str:
    """The function, or the type with all its template arguments."""
    if settings.function:
        return settings.function
    if "<" in settings.type:
        _check_placeholders("type", settings.type, list(ROW_FIELDS), where)
        return settings.type
    traits = [*settings.traits, *(value.trait for value in settings.values)]
    if op == "backward" and settings.axes["general"]:
        traits.append("with::GeneralScore")
    shape = ", ".join(f"{{{name}}}" for name in (*DIM_FIELDS, *TILE_FIELDS))
    arguments = ["{element}", f"TileShape<{shape}>", *filter(None, traits)]
    return f"{settings.type}<{', '.join(arguments)}>"


def _check_placeholders(name: str, text: str, allowed: list[str], where: str) -> None:
    for placeholder in re.findall(r"{(.*?)}", text):
        choose(placeholder, allowed, f"a placeholder of {name}", where)
