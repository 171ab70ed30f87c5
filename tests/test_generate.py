"""kernels/generate.py: the manifest's rows, the files made from them, and its error messages."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"


def _load_generator():
    spec = importlib.util.spec_from_file_location("generate", KERNELS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate = _load_generator()

MANIFEST = """
scores = { identity = "IdentityScore", softcap = "SoftcapScore" }

[kernel."fast"]
device = "cuda"
include = "fast/forward.hpp"
type = "fast::Forward<{element}, {head_dim}, {head_dim_v}, {m}, {n}, {warps}, {columns}>"
scores = ["identity"]
options = []
min_compute_capability = 80
alignment = 16
head_dim_multiple = 8

[kernel."plain/slow"]
device = "cuda"
options = ["softcap", "dropout"]
include = "plain/slow.hpp"
type = "plain::Slow<{element}>"
automatic = false

[kernel."cpu"]
device = "cpu"
include = "cpu/attention.hpp"
function = "cpu::attention"

[[variant]]
kernel = "fast"
dtypes = ["f16", "bf16"]
head_dims = [64]
tile = { m = 128, n = 64, warps = 8 }
tier = "core"
simt = true

[[variant]]
kernel = "fast"
dtypes = ["f16"]
head_dims = [256, [192, 128]]
tile = { m = 64, n = 32, warps = 4 }
tier = "full"

[[variant]]
kernel = "fast"
dtypes = ["f16"]
head_dims = [256]
tile = { m = 64, n = 32, warps = 2, columns = 2 }
tier = "full"

[[variant]]
kernel = "fast"
dtypes = ["bf16"]
head_dims = [512]
tile = { m = 32, n = 32, warps = 2, columns = 4 }
tier = "full"
simt = "core"

[[variant]]
kernel = "cpu"
dtypes = ["f32"]
tier = "core"

[[variant]]
kernel = "plain/slow"
dtypes = ["f32"]
tier = "core"
simt = true
"""


TUNED = """
[smem_100.fast]
d64 = [{ tile = "128x64x8" }]
d256 = [{ tile = "64x32x2c2", min_blocks_per_sm = 1.5 }, { tile = "64x32x4" }]

[smem_228.fast]
d192v128 = [{ tile = "64x32x4" }]

[smem_228.fast.decode]
d64 = [{ tile = "128x64x8" }]
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def load(tmp_path, text):
    return generate.load(write(tmp_path, "manifest.toml", text))[0]


def made(tmp_path, text=MANIFEST, **build):
    return generate.outputs(load(tmp_path, text), [], generate.Build(**build))


def test_rows_are_ordered_gpu_then_cpu_then_simt(tmp_path):
    rows, scores = generate.load(write(tmp_path, "manifest.toml", MANIFEST))
    assert [row.key for row in rows] == [
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
    assert list(scores.values()) == ["IdentityScore", "SoftcapScore"]


def test_a_unit_launches_the_type_with_every_score(tmp_path):
    files = made(tmp_path)
    unit = files["fast_f16_d64_128x64x8.cu"]
    assert '#include "fast/forward.hpp"' in unit
    assert '#include "simt/device_launch.hpp"' in unit
    assert "Status launch_fast_f16_d64_128x64x8(AttnParams const& params" in unit
    assert (
        "simt::launch_device<fast::Forward<cutlass::half_t, 64, 64, 128, 64, 8, 1>, "
        "IdentityScore>(params, options)" in unit
    )
    wide = made(tmp_path, tier="full")["fast_f16_d192v128_64x32x4.cu"]
    assert "fast::Forward<cutlass::half_t, 192, 128, 64, 32, 4, 1>" in wide
    # Compiled for the CPU in a tier of its own.
    split = files["fast_bf16_d512_32x32x2c4_simt.cpp"]
    assert "fast::Forward<cutlass::bfloat16_t, 512, 512, 32, 32, 2, 4>" in split
    assert "fast_bf16_d512_32x32x2c4.cu" not in files
    host = files["plain_slow_f32_simt.cpp"]
    assert '#include "simt/host_launch.hpp"' in host
    assert "simt::launch_host<plain::Slow<float>, IdentityScore, SoftcapScore>" in host


def test_registry_lines(tmp_path):
    files = made(tmp_path)
    every = " | ".join(f"option::{name}" for name in generate.OPTIONS)
    table = files["registry_table.inc"].splitlines()[1:]
    assert table[0] == (
        'CA_VARIANT(launch_fast_f16_d64_128x64x8, nullptr, "fast", "fast/f16/d64/128x64x8", '
        'Device::kCuda, DType::kFloat16, 64, 64, 8, Accumulate::kFloat32, 0, 128, "128x64x8", '
        '"core", true, true, 80, 16)'
    )
    assert table[2] == (  # a row beyond the tier keeps its line, without a launcher
        'CA_VARIANT(nullptr, &facts_fast_f16_d256_64x32x4, "fast", "fast/f16/d256/64x32x4", '
        'Device::kCuda, DType::kFloat16, 256, 256, 8, Accumulate::kFloat32, 0, 64, "64x32x4", '
        '"full", false, true, 80, 16)'
    )
    assert ", 192, 128, 8, Accumulate::kFloat32, 0, 64, " in table[3]
    assert ", option::softcap | option::dropout, 0, " in table[6]
    assert table[7] == (
        'CA_VARIANT(cpu::attention, nullptr, "cpu", "cpu/f32", Device::kCpu, '
        f'DType::kFloat32, 0, 0, 0, Accumulate::kFloat32, {every}, 0, "", "core", true, true, 0, 1)'
    )
    assert table[9] == (  # simt: a CPU row, by name only, with the kernel's alignment
        'CA_VARIANT(launch_fast_bf16_d64_128x64x8_simt, nullptr, "fast-simt", '
        '"fast-simt/bf16/d64/128x64x8", Device::kCpu, DType::kBFloat16, 64, 64, 8, '
        'Accumulate::kFloat32, 0, 128, "128x64x8", "core", true, false, 0, 16)'
    )
    launchers = files["registry_launchers.inc"].splitlines()
    assert '#include "cpu/attention.hpp"' in launchers
    for line in table:
        launcher = line.removeprefix("CA_VARIANT(").split(",")[0]
        declared = f"CA_LAUNCHER({launcher})" in launchers
        assert declared == launcher.startswith("launch_")


@pytest.mark.parametrize(
    ("build", "units"),
    [
        ({"tier": "full", "simt": False}, 7),
        ({"tier": "core", "simt": False}, 3),
        ({"cuda": False}, 4),
        ({"cuda": False, "simt": False}, 0),
    ],
)
def test_tier_cuda_and_simt_choose_the_units_but_not_the_rows(tmp_path, build, units):
    files = made(tmp_path, **build)
    assert sum(name.endswith((".cu", "_simt.cpp")) for name in files) == units
    assert files["registry_table.inc"].count("CA_VARIANT(") == 12
    assert files["registry_launchers.inc"].count("CA_LAUNCHER(") == units
    facts = "kernel_facts.cpp" in files
    assert files["units.cmake"].count("CMAKE_CURRENT_LIST_DIR") == units + facts


def test_gpu_rows_left_out_can_be_compiled_later(tmp_path):
    files = made(tmp_path)
    sources = json.loads(files["units.json"])
    assert list(sources) == [
        "fast/f16/d256/64x32x4",
        "fast/f16/d192v128/64x32x4",
        "fast/f16/d256/64x32x2c2",
        "fast/bf16/d512/32x32x2c4",
    ]
    source = sources["fast/f16/d192v128/64x32x4"]
    assert '#include "fast/forward.hpp"' in source
    assert "using Kernel = fast::Forward<cutlass::half_t, 192, 128, 64, 32, 4, 1>;" in source
    assert 'extern "C" CA_KERNEL_ENTRY(identity, Kernel, IdentityScore)' in source
    facts = "facts_fast_f16_d192v128_64x32x4"
    assert f"{facts} = facts_of<fast::Forward<" in files["kernel_facts.cpp"]
    assert f"CA_FACTS({facts})" in files["registry_launchers.inc"]

    for build in (
        {"tier": "full"},
        {"cuda": False},
    ):  # nothing is left out; nothing could be loaded
        files = made(tmp_path, **build)
        assert json.loads(files["units.json"]) == {}
        assert "kernel_facts.cpp" not in files
        assert "&facts_" not in files["registry_table.inc"]


def test_the_command_writes_only_what_changed_and_removes_stale_units(tmp_path):
    manifest, out = tmp_path / "manifest.toml", tmp_path / "gen"
    manifest.write_text(MANIFEST)
    tuned = write(tmp_path, "tuned.toml", TUNED)
    space = write(tmp_path, "space.toml", "")
    command = ["--manifest", str(manifest), "--tuned", str(tuned), "--out", str(out), "--cuda"]
    command += ["--space", str(space)]
    assert generate.main([*command, "--simt"]) == 0
    unit, table = out / "fast_f16_d64_128x64x8.cu", out / "registry_table.inc"
    assert (out / "plain_slow_f32_simt.cpp").is_file()
    for path in (unit, table):
        os.utime(path, (1, 1))

    assert generate.main(command) == 0
    assert not (out / "plain_slow_f32_simt.cpp").exists()
    assert unit.stat().st_mtime == 1
    assert table.stat().st_mtime != 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'dtypes = ["f16", "bf16"]',
            'dtypes = ["f8"]',
            r"variant\]\] 1 \(kernel fast\): dtypes is",
        ),
        ('kernel = "cpu"', 'kernel = "gpu"', r"5: kernel is 'gpu'; allowed: fast, plain/slow, cpu"),
        ("head_dims = [64]", "head_dims = [520]", r"head_dims has 520; allowed: 1 to 512"),
        ("head_dims = [64]", "head_dims = [[64]]", r"head_dims has \[64\]; allowed: 1 to 512, or"),
        ("{head_dim_v}, ", "", r"head_dims has \[192, 128\], .* has no head_dim_v"),
        (", {columns}", "", "tile has columns, .* does not use them"),
        ('simt = "core"', 'simt = "cor"', "simt is 'cor'; allowed: core, full"),
        ('["softcap", "dropout"]', '["sink"]', "options is 'sink'; allowed: softcap, negative_sc"),
        ('["softcap", "dropout"]', '["bias"]', "'bias', which needs one of the scores general"),
        ('scores = ["identity"]', 'scores = ["alibi"]', "scores is 'alibi'; allowed: identity, so"),
        ("head_dims = [64]", "", "head_dims is missing"),
        ("warps = 8", "wraps = 8", "tile: warps is missing"),
        ('tier = "full"', 'tier = "ful"', "2 .*tier is 'ful'; allowed: core, full"),
        ('tier = "full"', "tier = 3", "tier is 3; it must be a str"),
        (
            "min_compute_capability",
            'accumulate = "half"\nmin_compute_capability',
            "accumulate is 'half'; allowed: fp32, fp16_qk, fp16_pv, fp16",
        ),
        ("min_compute_capability", "min_cc", r'kernel."fast"\]: unknown entry min_cc'),
        ("{warps}", "{stages}", "asks for stages"),
        (
            'tier = "core"\n\n',
            'tier = "core"\nsimt = true\n\n',
            "simt is for kernels of device cuda",
        ),
        ('dtypes = ["f32"]\n', 'dtypes = ["f32"]\nhead_dims = [64]\n', "does not use it"),
        ('"plain/slow"\ndtypes = ["f32"]', '"plain/slow"\ndtypes = ["f32", "f32"]', "there twice"),
        ("scores = {", "scores = [", "not TOML"),
    ],
)
def test_a_wrong_manifest_is_refused_by_row(tmp_path, old, new, message):
    assert old in MANIFEST
    with pytest.raises(generate.ManifestError, match=message):
        load(tmp_path, MANIFEST.replace(old, new))


def test_rules_of_tuned_toml_become_lines_in_their_order(tmp_path):
    tuned = generate.load_tuned(load(tmp_path, MANIFEST), write(tmp_path, "tuned.toml", TUNED))
    lines = generate.outputs([], tuned, generate.Build())["tuned_table.inc"].splitlines()[1:]
    assert lines == [
        'CA_TUNED(100, "fast", 64, 64, "128x64x8", 0.0f, false)',
        'CA_TUNED(100, "fast", 256, 256, "64x32x2c2", 1.5f, false)',
        'CA_TUNED(100, "fast", 256, 256, "64x32x4", 0.0f, false)',
        'CA_TUNED(228, "fast", 192, 128, "64x32x4", 0.0f, false)',
        'CA_TUNED(228, "fast", 64, 64, "128x64x8", 0.0f, true)',
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("smem_100", "smem_99", "device class is 'smem_99'; allowed: smem_100, smem_164, smem_228"),
        (".fast]\nd64", ".slow]\nd64", r'smem_100."slow"\] d64: no row of the manifest'),
        ("decode]\nd64", "decode]\nd80", r'smem_228."fast".decode\] d80: no row of the manifest'),
        ("fast.decode", "fast.prefill", r'smem_228."fast"\] prefill: head dims are like d64'),
        ("d64", "d80", r'smem_100."fast"\] d80: no row of the manifest'),
        ("128x64x8", "64x64x4", "tile is '64x64x4'; allowed: 128x64x8"),
        (', { tile = "64x32x4" }', "", "the last tile, and no other, is without min_blocks"),
        ("min_blocks_per_sm = 1.5", "min_tiles = 1.5", "unknown entry min_tiles"),
        ("1.5", '"1.5"', "min_blocks_per_sm is '1.5'; allowed: a float above 0"),
    ],
)
def test_a_wrong_rule_is_refused_by_place(tmp_path, old, new, message):
    assert old in TUNED
    rows = load(tmp_path, MANIFEST)
    with pytest.raises(generate.ManifestError, match=message):
        generate.load_tuned(rows, write(tmp_path, "tuned.toml", TUNED.replace(old, new, 1)))


def test_the_projects_own_rules_name_rows():
    generate.load_tuned(generate.load()[0])


def test_the_projects_own_manifest_compiles_every_kernel_in_the_core_tier():
    rows, _ = generate.load()
    core = {row.kernel_name for row in rows if generate.Build().compiles(row)}
    # A GPU kernel with sums in fp16 is compiled at first use.
    assert core == {
        row.kernel_name for row in rows if row.kernel.accumulate == "fp32" or row.device == "cpu"
    }


def test_the_tuner_may_choose_tiles_of_every_kernel_of_sm80():
    """Any other would be without a source, were its tile in a tuning file."""
    rows, _ = generate.load()
    space = generate.load_space(rows)
    assert list(space) == list(
        dict.fromkeys(row.kernel_name for row in rows if "sm80" in row.kernel.code and not row.simt)
    )
    assert space["sm80/fp16_pv"]["axes"]["columns"] == [1]
    assert "{warps}, {columns}, float, cutlass::half_t>" in space["sm80/fp16_pv"]["source"]
