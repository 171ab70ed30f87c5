"""kernels/generate.py and what reads the manifest for it: rows, generated files."""

import json
import os
import re

import facts
import families
import generate
import pytest

MANIFEST = """
scores = { identity = "IdentityScore", softcap = "SoftcapScore" }

[family.fast]
type = "fast::Forward"
scores = ["identity"]
rows = [
  { tile = "128x64x8", head_dims = [64], tier = "core", simt = ["f16", "bf16"] },
  { tile = "64x32x4", head_dims = [256, [192, 128]], dtypes = ["f16"], entry_names = "plain" },
  { tile = "64x32x2c2", head_dims = [256], min_head_dim = 200, dtypes = ["f16"], cost = COST },
  { tile = "32x32x2c4", head_dims = [512], dtypes = ["bf16"], simt = ["bf16"] },
]

[family.cpu]
function = "cpu::attention_forward"
include = "cpu/attention.hpp"
tier = "core"
rows = [{ dtypes = ["f32"] }]

[family.slow]
type = "plain::Slow<{element}>"
arch = "90a"
options = ["dropout"]
entry_names = "plain"
automatic = false
rows = [{ dtypes = ["f32"], tier = "core", simt = ["f32"] }]
""".replace("COST", "{ tile_us = 4.5, step_us = 1.25 }")


TUNED = """
[smem_100.fast]
d64 = ["128x64x8"]
d256 = ["64x32x2c2", "64x32x4"]

[smem_228.fast]
d192v128 = ["64x32x4"]

[smem_228.fast.decode]
d64 = ["128x64x8"]
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def load(tmp_path, text):
    return generate.load(write(tmp_path, "manifest.toml", text))


def made(tmp_path, text=MANIFEST, **build):
    return generate.outputs(load(tmp_path, text), [], generate.Build(**build))


def test_rows_are_ordered_gpu_then_cpu_then_simt(tmp_path):
    assert [row.key for row in load(tmp_path, MANIFEST)] == [
        "fast/f16/d64/128x64x8",
        "fast/bf16/d64/128x64x8",
        "fast/f16/d256/64x32x4",
        "fast/f16/d192v128/64x32x4",
        "fast/f16/d256/64x32x2c2",
        "fast/bf16/d512/32x32x2c4",
        "plain/slow/f32",
        "cpu/f32",
        "fast-simt/f16/d64/128x64x8",
        "fast-simt/bf16/d64/128x64x8",
        "fast-simt/bf16/d512/32x32x2c4",
        "plain/slow-simt/f32",
    ]


def table(files, name):
    """The entries of a table of manifest_table.inc: {field: value as in C++}."""
    text = files["manifest_table.inc"].partition(f" {name}[] = {{\n")[2].partition("};\n")[0]
    entries = [line.strip().removeprefix("{").removesuffix("},") for line in text.splitlines()]
    return [dict(field.split(" = ") for field in re.split(r", \.|^\.", x)[1:]) for x in entries]


def test_a_unit_has_an_entry_for_every_score(tmp_path):
    files = made(tmp_path)
    unit = files["fast_f16_d64_128x64x8.cu"]
    assert '#include "fast/forward.hpp"' in unit
    assert "fast::Forward<cutlass::half_t, TileShape<64, 64, 128, 64, 8, 1>>" in unit
    assert unit.count("CA_KERNEL_ENTRY") == 1 and "IdentityScore" in unit
    wide = made(tmp_path, tier="full")["fast_f16_d192v128_64x32x4.cu"]
    assert "fast::Forward<cutlass::half_t, TileShape<192, 128, 64, 32, 4, 1>>" in wide
    # Compiled for the CPU in a tier of its own.
    split = files["fast_simt_bf16_d512_32x32x2c4.cpp"]
    assert "fast::Forward<cutlass::bfloat16_t, TileShape<512, 512, 32, 32, 2, 4>>" in split
    assert "fast_bf16_d512_32x32x2c4.cu" not in files
    slow = files["plain_slow_simt_f32.cpp"]
    assert "plain::Slow<float>" in slow and "IdentityScore" in slow and "SoftcapScore" in slow


def test_entries_have_the_name_that_ptxas_schedules_by(tmp_path):
    """See PREFIXES in variant_key.py: of a kernel, or of a row of it."""
    files = made(tmp_path, tier="full", archs=("80", "90a"))
    sources = [text for name, text in files.items() if name.endswith(".cu")]
    entries = re.findall(r"CA_KERNEL_ENTRY\((\w+),", "".join(sources))
    assert len(entries) > len(sources) > 0
    with_name = [entry for entry in entries if "cutlass" in entry]
    assert 0 < len(with_name) < len(entries)
    plain = {entry for entry in entries if entry not in with_name}
    assert plain == {
        "attn_plain_slow_f32",
        "attn_fast_f16_d256_64x32x4",
        "attn_fast_f16_d192v128_64x32x4",
    }
    symbols = {row["key"].strip('"'): row["symbol"] for row in table(files, "kRows")}
    assert symbols["plain/slow/f32"] == '"attn_plain_slow_f32"'
    assert symbols["fast/f16/d64/128x64x8"] == '"cutlass_attn_fast_f16_d64_128x64x8"'


def test_tables_of_kernels_and_rows(tmp_path):
    files = made(tmp_path, archs=("80", "90a"))
    fast, slow, cpu = table(files, "kKernels")
    assert (fast["compute_capability"], fast["alignment"]) == ("{80, 999}", "16")
    assert (fast["options"], fast["head_dim_multiple"]) == ("option::sinks", "8")
    assert (slow["compute_capability"], slow["arch"]) == ("{90, 90}", '"90a"')
    of_softcap = "option::softcap | option::negative_scale"
    assert slow["options"] == f"{of_softcap} | option::sinks | option::dropout"
    assert (slow["automatic"], slow["head_dim_multiple"]) == ("false", "0")
    assert cpu["function"] == "&cpu::attention_forward" and "arguments" not in cpu
    assert "arguments_of<ForwardParams" in fast["arguments"] and "function" not in fast
    rows = {row["key"].strip('"'): row for row in table(files, "kRows")}
    assert list(rows) == [row.key for row in load(tmp_path, MANIFEST)]
    compiled = rows["fast/f16/d64/128x64x8"]
    assert compiled["compiled"] == "true"
    left_out = rows["fast/f16/d192v128/64x32x4"]
    assert (left_out["compiled"], left_out["unit"]) == ("false", "nullptr")
    assert (left_out["head_dim"], left_out["head_dim_v"]) == ("192", "128")
    assert left_out["min_head_dim"] == "0"
    assert rows["fast/f16/d256/64x32x2c2"]["min_head_dim"] == "200"
    assert rows["cpu/f32"]["compiled"] == "true" and rows["cpu/f32"]["unit"] == "nullptr"
    assert rows["fast/f16/d256/64x32x2c2"]["cost"] == "{32, 4.5f, 1.25f}"
    assert compiled["cost"] == "{}"
    simt = rows["fast-simt/bf16/d64/128x64x8"]
    assert (simt["kernel"], simt["is_simt"], compiled["is_simt"]) == ('"fast"', "true", "false")
    # Every unit that a row names is declared and compiled.
    units = {row["unit"] for row in rows.values()} - {"nullptr"}
    assert all(
        f"extern KernelUnit const {unit[1:]};" in files["manifest_units.inc"] for unit in units
    )
    sources = [text for name, text in files.items() if name.endswith((".cu", ".cpp"))]
    assert len(sources) == len(units)


def test_kernels_of_an_arch_have_units_of_their_own(tmp_path):
    by_arch = made(tmp_path, archs=("80", "90a"))["units.cmake"]
    assert "plain_slow_f32.cu" in by_arch.partition("CUDA_UNITS_90a")[2].partition(")")[0]
    files = made(tmp_path, archs=("80",))  # left to the run-time compiler
    assert "plain_slow_f32.cu" not in files
    assert "plain/slow/f32" in json.loads(files["units.json"])


@pytest.mark.parametrize(
    ("build", "units"),
    [
        ({"tier": "full", "simt": "none", "archs": ("80", "90a")}, 7),
        ({"tier": "core", "simt": "none", "archs": ("80", "90a")}, 3),
        ({"cuda": False}, 4),
        ({"cuda": False, "simt": "scalar"}, 0),
        ({"cuda": False, "simt": "none"}, 0),
    ],
)
def test_tier_cuda_and_simt_choose_the_units_but_not_the_rows(tmp_path, build, units):
    files = made(tmp_path, **build)
    assert sum(name.endswith((".cu", ".cpp")) for name in files) == units
    assert len(table(files, "kRows")) == 12
    assert files["manifest_units.inc"].count("__unit;") == units
    assert files["units.cmake"].count("CMAKE_CURRENT_LIST_DIR") == units


def test_gpu_rows_left_out_can_be_compiled_later(tmp_path):
    files = made(tmp_path, archs=("80", "90a"))
    sources = json.loads(files["units.json"])
    assert list(sources) == [
        "fast/f16/d256/64x32x4",
        "fast/f16/d192v128/64x32x4",
        "fast/f16/d256/64x32x2c2",
        "fast/bf16/d512/32x32x2c4",
    ]
    source = sources["fast/f16/d192v128/64x32x4"]
    # The same text as nvcc would compile.
    full = made(tmp_path, tier="full", archs=("80", "90a"))
    assert source == full["fast_f16_d192v128_64x32x4.cu"]
    # Nothing is left out; nothing could be loaded.
    for files in (full, made(tmp_path, cuda=False)):
        assert json.loads(files["units.json"]) == {}


def test_a_build_of_tier_core_leaves_scores_to_nvrtc(tmp_path):
    axes = 'terms = ["softcap", "alibi"], core_scores = ["identity", "softcap"], tier = "core"'
    text = (
        ONE.replace("TYPE", FORWARD).replace("AXES", axes).replace("[{ t", '[{ simt = ["f16"], t')
    )
    files = made(tmp_path, text)
    (left_out,) = json.loads(files["units.json"]).values()
    unit, simt = files["sm80_f16_d64_64x64x4.cu"], files["sm80_simt_f16_d64_64x64x4.cpp"]
    for token in ("identity", "softcap", "alibi", "softcap_alibi"):
        entry = f"{token}, cutlass_attn_sm80_f16_d64_64x64x4__kernel, "
        is_core = "alibi" not in token
        assert (entry in unit, entry in left_out) == (is_core, not is_core)
    assert "Score<>, Score<Softcap>, Score<Alibi>, Score<Softcap, Alibi>>()" in simt
    full = made(tmp_path, text, tier="full")
    assert full["units.json"] == "{}"
    assert full["sm80_f16_d64_64x64x4.cu"].count("CA_KERNEL_ENTRY") == 4


def test_plain_terms_have_entries_without_cutlass_in_their_names(tmp_path):
    axes = 'terms = ["softcap", "alibi"]'
    text = ONE.replace("TYPE", FORWARD).replace("AXES", axes)
    files = made(tmp_path, text.replace("[{ t", '[{ plain_terms = ["alibi"], t'), tier="full")
    unit = files["sm80_f16_d64_64x64x4.cu"]
    entries = re.findall(r"CA_KERNEL_ENTRY\((\w+), (\w+),", unit)
    names = {"identity": "cutlass_attn", "softcap": "cutlass_attn"}
    names |= {"alibi": "attn", "softcap_alibi": "attn"}
    assert entries == [(f"{name}_sm80_f16_d64_64x64x4", score) for score, name in names.items()]
    assert entries == re.findall(r"CA_ENTRY\((\w+), (\w+)\)", unit)
    (row,) = table(files, "kRows")
    assert row["plain_scores"] == str(0b1100)


def test_scores_of_a_kernel_take_the_place_of_its_familys_terms(tmp_path):
    text = ONE.replace("TYPE", FORWARD).replace("AXES", 'scores = ["general"]')
    family = 'terms = ["softcap", "alibi"]\ncore_scores = ["identity"]\nkernels'
    (row,) = load(tmp_path, text.replace("kernels", family))
    assert list(row.kernel.scores) == ["general"] == list(row.kernel.core_scores)


def test_kernels_without_rows_have_those_of_their_family(tmp_path):
    """Changed by the kernel's own dtypes, tier and simt; the kernels keep their order."""
    text = """
scores = { identity = "IdentityScore" }

[family.one]
type = "sm80::Forward"
tier = "core"
rows = [
  { tile = "64x64x4", head_dims = [64], simt = ["f16"] },
  { tile = "64x32x4", head_dims = [128], dtypes = ["bf16"], tier = "full" },
]
kernels = [
  { layout = "varlen" },
  { rows = [{ tile = "32x32x4", head_dims = [64] }], dtypes = ["f16"] },
  { dropout = true, dtypes = ["bf16"], tier = "full", simt = [] },
]
"""
    assert [(row.key, row.tier) for row in load(tmp_path, text)] == [
        ("sm80/varlen/f16/d64/64x64x4", "core"),
        ("sm80/varlen/bf16/d64/64x64x4", "core"),
        ("sm80/varlen/bf16/d128/64x32x4", "full"),
        ("sm80/f16/d64/32x32x4", "core"),
        ("sm80/dropout/bf16/d64/64x64x4", "full"),
        ("sm80/dropout/bf16/d128/64x32x4", "full"),
        ("sm80/varlen-simt/f16/d64/64x64x4", "core"),
    ]


def test_the_command_writes_only_what_changed_and_removes_stale_units(tmp_path):
    manifest, out = tmp_path / "manifest.toml", tmp_path / "gen"
    manifest.write_text(MANIFEST)
    tuned = write(tmp_path, "tuned.toml", TUNED)
    space = write(tmp_path, "space.toml", "")
    command = ["--manifest", str(manifest), "--tuned", str(tuned), "--out", str(out), "--cuda"]
    command += ["--space", str(space)]
    assert generate.main([*command, "--simt", "all"]) == 0
    unit, table = out / "fast_f16_d64_128x64x8.cu", out / "manifest_table.inc"
    assert (out / "plain_slow_simt_f32.cpp").is_file()
    for path in (unit, table):
        os.utime(path, (1, 1))

    assert generate.main(command) == 0
    assert not (out / "plain_slow_simt_f32.cpp").exists()
    assert unit.stat().st_mtime == 1
    assert table.stat().st_mtime != 1


def test_calls_that_a_kernel_avoids_are_ranges(tmp_path):
    axes = "avoids = [{ rows = [0, 17], blocks_per_sm = [1.5, inf] }, { splits = [1, 2] }]"
    text = ONE.replace("TYPE", FORWARD).replace("AXES", axes)
    text = made(tmp_path, text)["manifest_table.inc"]
    first = "{.blocks_per_sm = {1.5f, kUnlimited}, .rows = {0.0f, 17.0f}}"
    assert f".avoids = {{{first}, {{.splits = {{1.0f, 2.0f}}}}}}, .num_avoids = 2" in text


def test_a_kernel_leaves_calls_to_one_later_kernel(tmp_path):
    """But not to one before it, nor to one that there is not."""
    of_row = 'rows = [{ tile = "64x64x4", head_dims = [64], dtypes = ["f16"] }]'
    leaves = 'avoids = [{ to = "sm80/second", rows = [0, 17] }]'
    first, second = (f'name = "sm80/{name}", {of_row}' for name in ("first", "second"))

    def table_of(*kernels):
        text = ONE.replace("TYPE", FORWARD).replace(f"{{ AXES, {of_row} }}", ", ".join(kernels))
        return made(tmp_path, text)["manifest_table.inc"]

    entry = '.avoids = {{.rows = {0.0f, 17.0f}, .to = "sm80/second"}}, .num_avoids = 1'
    assert entry in table_of(f"{{ {leaves}, {first} }}", f"{{ {second} }}")
    for kernels in ([f"{{ {second} }}", f"{{ {leaves}, {first} }}"], [f"{{ {leaves}, {first} }}"]):
        with pytest.raises(generate.ManifestError, match="to is 'sm80/second'; allowed: "):
            table_of(*kernels)


# A manifest of one kernel of this type, scores and axes.
ONE = """
scores = { identity = "IdentityScore", softcap = "SoftcapScore", general = "GeneralScore" }

[family.one]
type = "TYPE"
params = "{quantize}{layout}Params"
kernels = [
  { AXES, rows = [{ tile = "64x64x4", head_dims = [64], dtypes = ["f16"] }] },
]
"""
FORWARD, BACKWARD = "sm80::Forward", "sm80::Backward"
SCORE_OPTIONS = "softcap negative_scale alibi_slopes bias mask attention_chunk"


@pytest.mark.parametrize(
    ("type_", "axes", "name", "code", "expected"),
    [
        (
            FORWARD,
            {"scores": ["identity"]},
            "sm80",
            "Forward<{element}, TileShape<{head_dim}, {head_dim_v}, {m}, {n}, {warps}, {columns}>>",
            {"options": "sinks", "needs": "", "arch": "80", "pre_post": False, "tma": False},
        ),
        (
            FORWARD,
            {"layout": "paged", "kv": "fp8", "scores": ["general"], "options": ["kv_scales"]},
            "sm80/paged_fp8_general",
            ", with::Pages, with::StoredAs<E4M3>>",
            {
                "options": f"{SCORE_OPTIONS} sinks varlen paged_kv kv_scales fp8_kv",
                "needs": "fp8_kv",
                "alignment": 16,
                "head_dim_multiple": 16,
            },
        ),
        (
            "sm90::Forward",
            {"layout": "paged", "scores": ["identity"]},
            "sm90/paged",
            "{columns}>, with::Pages>",
            {"options": "sinks varlen paged_kv", "needs": "paged_kv", "arch": "90a", "tma": True},
        ),
        (
            FORWARD,
            {"quantize": "fp8", "layout": "varlen", "scores": ["general"]},
            "sm89/int8_fp8_varlen_general",
            "with::Accumulators<int32_t, cutlass::half_t>, with::PackedRows>",
            {
                "options": f"{SCORE_OPTIONS} sinks varlen",
                "needs": "varlen",
                "params": "Fp8ValuesVarlenParams",
                "arch": "89",
                "pre_post": True,
                "alignment": 2,
                "head_dim_multiple": 8,
                "quantize": "fp8",
            },
        ),
        (
            FORWARD,
            {"accumulate": "fp16_qk", "scores": ["identity"]},
            "sm80/fp16_qk",
            "{columns}>, with::Accumulators<cutlass::half_t, float>>",
            {"accumulate": "fp16_qk", "options": "sinks"},
        ),
        (
            FORWARD,
            {"dropout": True, "scores": ["identity"]},
            "sm80/dropout",
            "{columns}>, with::Dropout>",
            {"options": "sinks dropout", "needs": "dropout", "pairs": ""},
        ),
        (
            FORWARD,
            {"bias": True, "mask": True, "terms": ["alibi", "chunk"]},  # chunks are in the map
            "sm80/bias_mask",
            "{columns}>, with::Bias, with::Mask>",
            {"scores": "bias_mask alibi_bias_mask", "pairs": "bias", "pre_post": True},
        ),
        (
            BACKWARD,
            {"layout": "varlen", "ordered": True, "arch": "90a", "scores": ["general"]},
            "sm90/backward_varlen_general_ordered",
            "{columns}>, with::PackedRows, with::FixedOrder, with::GeneralScore>",
            {
                "options": f"{SCORE_OPTIONS} sinks varlen deterministic",
                "op": "backward",
                "pre_post": True,
                "alignment": 16,
            },
        ),
        (
            "sm90::Backward",
            {"bias": True, "mask": True, "ordered": True, "terms": ["softcap"]},
            "sm90/backward_with_bias_mask_ordered",
            "{columns}>, with::Bias, with::Mask, with::FixedOrder>",
            {"needs": "bias mask"},
        ),
        (
            "sm90::Backward",
            {"bias": True, "mask": True, "bias_grad": True, "terms": ["softcap"]},
            "sm90/backward_mask_bias_grad",
            "{columns}>, with::Bias, with::Mask, with::BiasGrad>",
            {"needs": "bias mask bias_grad"},
        ),
        (
            "sm80::Latent",
            {"kv": "ds_mla", "latent": True, "scores": ["identity"]},
            "sm80/latent_ds_mla",
            "{columns}>, with::StoredAs<DsMla>>",
            {"options": "sinks ds_mla latent_kv", "needs": "ds_mla latent_kv"},
        ),
        (
            "sm90::SplitKeys",
            {"terms": ["softcap", "alibi"], "bias": True},
            "sm90/split_keys_bias",
            "{columns}>, with::Bias>",
            {
                "scores": "bias softcap_bias alibi_bias softcap_alibi_bias",
                "options": "softcap negative_scale alibi_slopes bias sinks",
                "needs": "bias",
                "include": "sm90/split_keys.hpp",
                "arch": "90a",
                "tma": True,
            },
        ),
    ],
)
def test_what_follows_from_a_kernels_axes(tmp_path, type_, axes, name, code, expected):
    listed = ", ".join(f"{axis} = {json.dumps(value)}" for axis, value in axes.items())
    text = ONE.replace("TYPE", type_).replace("AXES", listed)
    (row,) = load(tmp_path, text)
    kernel = row.kernel
    assert kernel.name == name
    assert kernel.code.endswith(code)
    for field, value in expected.items():
        found = getattr(kernel, field)
        is_list = field in ("options", "needs", "pairs", "scores")
        assert (" ".join(found) if is_list else found) == value


def test_axes_have_the_values_of_the_facts():
    for axis in ("accumulate", "quantize"):
        assert set(families.AXES[axis]) == set(facts.FACTS[axis])
