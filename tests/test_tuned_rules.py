"""kernels/runtime/tuned.toml: rules of tiles, and what is refused."""

import generate
import pytest
from test_generate import MANIFEST, TUNED, load, table, write


def test_rules_of_tuned_toml_keep_their_order(tmp_path):
    tuned = generate.load_tuned(load(tmp_path, MANIFEST), write(tmp_path, "tuned.toml", TUNED))
    rules = table(generate.outputs([], tuned, generate.Build()), "kTuned")
    fields = ("smem_kb", "kernel", "head_dim", "head_dim_v", "tile", "decode")
    assert [tuple(rule[field] for field in fields) for rule in rules] == [
        ("100", '"fast"', "64", "64", '"128x64x8"', "false"),
        ("100", '"fast"', "256", "256", '"64x32x2c2"', "false"),
        ("100", '"fast"', "256", "256", '"64x32x4"', "false"),
        ("228", '"fast"', "192", "128", '"64x32x4"', "false"),
        ("228", '"fast"', "64", "64", '"128x64x8"', "true"),
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
        (
            '"64x32x2c2"',
            '{ tile = "64x32x2c2" }',
            r"smem_100.\"fast\"\] d256 must be a list of tiles",
        ),
    ],
)
def test_a_wrong_rule_is_refused_by_place(tmp_path, old, new, message):
    assert old in TUNED
    rows = load(tmp_path, MANIFEST)
    with pytest.raises(generate.ManifestError, match=message):
        generate.load_tuned(rows, write(tmp_path, "tuned.toml", TUNED.replace(old, new, 1)))
