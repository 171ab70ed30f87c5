"""kernels/manifest.toml, tuned.toml and space.toml as they are: what the tiers compile, and what
may be chosen."""

import generate


def test_rules_name_rows():
    generate.load_tuned(generate.load())


def test_every_kernel_is_compiled_in_the_core_tier_or_at_first_use():
    rows = generate.load()
    core = {row.kernel_name for row in rows if generate.Build().compiles(row)}
    # Kernels that "auto" takes only for such sums, for a bias or a mask, for rare options of packed
    # calls or of 8 bits, on Hopper alone, or never, backward passes that are rare, and over a cache
    # in 8 bits prefill,
    # or decoding on GPUs that convert it bit by bit: compiled at first use.
    at_first_use = {row.kernel_name for row in rows} - core
    fp16 = {"sm80/fp16", "sm80/fp16_qk", "sm80/fp16_pv"}
    names = ("bias", "varlen", "varlen_general", "ordered", "general_ordered")
    names += ("with_bias", "mask", "with_bias_mask")
    names += ("with_bias_dropout", "mask_dropout", "varlen_dropout")
    on_wgmma = ("q128", "mask", "varlen", "ordered", "with_bias", "with_bias_mask", "bias_grad")
    on_wgmma += ("mask_bias_grad", "dropout", "varlen_dropout", "mask_dropout")
    on_wgmma += ("with_bias_ordered", "bias_grad_ordered")
    backward = {
        "sm90/backward",
        "sm90/backward_dropout",
        "sm90/backward_wgmma",
        *(f"sm90/backward_wgmma_{name}" for name in on_wgmma),
        "sm90/backward_two_pass",
        "sm90/backward_two_pass_varlen",
        *(f"sm80/backward_{name}" for name in names),
    }
    fp8 = {"sm80/decode_fp8", "sm80/paged_fp8", "sm80/paged_fp8_general", "sm89/int8_fp8_general"}
    fp8 |= {f"sm80/latent{rows}_ds_mla{v4}" for rows in ("", "_64") for v4 in ("", "_v4")}
    fp8 |= {"sm80/wide_fp8", "sm89/wide_fp8"}
    general = {f"sm80/{name}_general" for name in ("int8_qk", "int8", "paged")}
    limited = {"sm80/int8_qk_limited", "sm80/int8_limited", "sm89/int8_fp8_limited"}
    limited |= {f"{name}_general" for name in limited}
    hopper = {"sm90", "sm90/split_keys", "sm90/bias", "sm90/varlen"}
    hopper |= {"sm90/mask", "sm90/bias_mask", "sm90/dropout"}
    rare_on_hopper = {"sm90/mask_dropout", "sm90/varlen_dropout", "sm90/paged", "sm90/int8_fp8"}
    rare_on_hopper |= {"sm90/latent", "sm90/latent_ds_mla", "sm90/wide"}
    in_8_bits = ("sm80/int8_qk", "sm80/int8", "sm89/int8_fp8")
    packed = {f"{name}_varlen{score}" for name in in_8_bits for score in ("", "_general")}
    others = {"wmma", "wmma/8x32x16", "sm80/mask"}
    others |= {"sm80/wide", "sm80/wide_64"}
    of_bias = ("bias", "bias_mask", "any_bias", "any_bias_mask")
    others |= {f"sm80/{name}" for name in of_bias}
    others |= {f"sm80/{name}_dropout" for name in (*of_bias, "mask", "varlen")}
    names = ("", *(f"{name}_" for name in of_bias), "mask_", "varlen_")
    max_logit = {f"sm80/{name}max_logit" for name in names}
    max_logit |= {f"sm90/{name}max_logit" for name in names if "bias" not in name}
    asked_for = limited | packed | rare_on_hopper | max_logit
    assert at_first_use == fp16 | backward | fp8 | general | asked_for | hopper | others
    assert all(row.tier == "core" for row in rows if row.key.startswith("sm90/bf16/d128/"))
    build = generate.Build(archs=("80", "89", "90a"))
    ahead = {(row.kernel_name, row.dtype) for row in rows if build.compiles(row)}
    names = hopper | {f"sm90/backward_wgmma{name}" for name in ("", "_mask", "_dropout")}
    assert {(name, dtype) for name in names for dtype in ("f16", "bf16")} <= ahead


def test_a_users_build_has_the_scalar_kernels_for_the_cpu():
    """Those that `verify=True` compares with."""
    rows = [row for row in generate.load() if row.simt]
    build = generate.Build(cuda=False, simt="scalar")
    compiled = {row.kernel_name for row in rows if build.compiles(row)}
    scalar = ("minimal", "tiled", "vectorized", "backward")
    assert compiled == {f"scalar/{name}-simt" for name in scalar}
    build = generate.Build(cuda=False, simt="all")
    assert all(build.compiles(row) for row in rows)


def test_the_tuner_may_choose_tiles_of_every_forward_kernel_of_sm80():
    """But for those of a cache in 8 bits, or whose blocks share keys, which have one tile. Any
    other would be without a source, were its tile in a tuning file."""
    rows = generate.load()
    space = generate.load_space(rows)
    assert set(space) == {
        row.kernel_name
        for row in rows
        if "sm80::Forward" in row.kernel.code
        and not (row.simt or row.kernel.needs or row.kernel.avoids)
    }
    assert space["sm80/fp16_pv"]["axes"]["columns"] == [1]
    assert "with::Accumulators<float, cutlass::half_t>" in space["sm80/fp16_pv"]["source"]
