"""What kernels/generate.py says of a manifest that is wrong."""

import generate
import pytest
from test_generate import MANIFEST, load


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # Of a family or a kernel.
        (
            "automatic",
            "aligned",
            r"\[family.slow\]: entry is 'aligned'; allowed: type, traits, function",
        ),
        (
            "rows = [\n",
            "kernels = [{ tma = true }]\nrows = [\n",
            r"fast\] kernel 1: entry is",
        ),
        ("automatic", "general", "entry is 'general'; allowed: type"),
        ("automatic", "name", "entry is 'name'; allowed: type"),
        ("rows = [\n", "kernels = []\nrows = [\n", r"\[family.fast\]: kernels must name at least"),
        ('rows = [{ dtypes = ["f32"] }]', "rows = []", r"family.cpu\]: rows must name at least"),
        (
            'rows = [{ dtypes = ["f32"] }]',
            "kernels = [{ rows = [{}] }, {}]",
            r"\[family.cpu\] kernel 2: rows is missing, in the kernel and in its family",
        ),
        (
            'rows = [{ dtypes = ["f32"] }]',
            "rows = [{}]\nkernels = [{ rows = [{}] }]",
            r"\[family.cpu\]: rows is given, and every kernel has its own",
        ),
        (
            "[family.cpu]",
            "[families.cpu]",
            "manifest: entry is 'families'; allowed: scores, family",
        ),
        (
            'arch = "90a"',
            'layout = "pages"',
            r"\[family.slow\] kernel 1: layout is 'pages'; allowed: dense, varlen, paged$",
        ),
        ('arch = "90a"', 'dropout = "yes"', "dropout is 'yes'; allowed: false, true$"),
        (
            'arch = "90a"',
            'accumulate = "half"',
            "accumulate is 'half'; allowed: fp32, fp16_qk, fp16_pv, fp16$",
        ),
        ('arch = "90a"', 'arch = "90"', r"kernel 1: arch is '90'; allowed: 80, 89, 90a$"),
        ('arch = "90a"', "arch = 90", "arch is 90; it must be a str"),
        ('scores = ["identity"]', 'scores = ["alibi"]', "scores is 'alibi'; allowed: identity, so"),
        (
            'scores = ["identity"]',
            'terms = ["softcap", "alibi"]\ncore_scores = ["alibi"]',
            r"core_scores is \['alibi'\]; allowed: the first of identity, softcap, alibi, softcap",
        ),
        (
            '[64], tier = "core"',
            '[64], plain_terms = ["alib"]',
            "plain_terms is 'alib'; allowed: so",
        ),
        ('scores = ["identity"]', 'terms = ["alib"]', "terms is 'alib'; allowed: softcap, alibi"),
        (
            '["dropout"]',
            '["softcap"]',
            "options is 'softcap'; allowed: score_mod, dropout, varlen, paged_kv",
        ),
        (
            '["dropout"]',
            '["bias_grad"]',
            "options is 'bias_grad'; allowed: score_mod, dropout, varlen",
        ),
        ('names = "plain"\nauto', 'names = "none"\nauto', "'none'; allowed: cutlass, plain"),
        (
            "<{element}>",
            "<{stages}>",
            "of type is 'stages'; allowed: element, head_dim, .* columns$",
        ),
        (
            'function = "cpu::attention_forward"',
            "",
            r"\[family.cpu\] kernel 1: one of type and function must be given",
        ),
        (
            'arch = "90a"',
            "avoids = [{ tiles = [0, 1] }]",
            "avoids is 'tiles'; allowed: blocks_per_",
        ),
        ('arch = "90a"', "avoids = [{ rows = [2, 2] }]", r"rows of avoids is \[2, 2\]; allowed: "),
        ('arch = "90a"', "avoids = [{ rows = 2 }]", "rows of avoids is 2; it must be a list"),
        ('arch = "90a"', "avoids = [{}, {}, {}, {}, {}]", "avoids has 5 entries; allowed: 4"),
        # Of a row.
        ('tier = "core", simt = ["f16"', 'teir = 1, simt = ["f16"', "fast row 1: entry is 'teir'"),
        (
            'head_dims = [512], dtypes = ["bf16"]',
            'head_dims = [512], dtypes = ["f8"]',
            "fast row 4: d",
        ),
        ("[64]", "[584]", r"\[family.fast\] fast row 1: head_dims has 584; allowed: 1 to 576"),
        ("[64]", "[[64]]", r"head_dims has \[64\]; allowed: 1 to 576, or a pair"),
        (
            '"fast::Forward"',
            '"fast::Forward<{head_dim}, {m}, {n}, {warps}, {columns}>"',
            r"row 2: head_dims has \[192, 128\], .* has no head_dim_v",
        ),
        (
            '"fast::Forward"',
            '"fast::Forward<{head_dim}, {head_dim_v}, {m}, {n}, {warps}>"',
            "row 3: tile has columns, .* does not use them",
        ),
        ("head_dims = [64], ", "", "head_dims is missing, 'fast::"),
        ('tile = "128x64x8", ', "", "tile is missing, 'fast::"),
        ("128x64x8", "128x64", "row 1: tile is '128x64'; it is like 128x64x4 or 32x32x2c4"),
        (
            "step_us = 1.25",
            "step = 1.25",
            "row 3: cost: entry is 'step'; allowed: tile_us, step_us",
        ),
        (", step_us = 1.25", "", "row 3: cost: step_us is missing"),
        ("1.25", "0.0", "cost: step_us is 0.0; allowed: above 0"),
        (
            'rows = [{ dtypes = ["f32"] }]',
            'rows = [{ dtypes = ["f32"], cost = { tile_us = 1.0, step_us = 1.0 } }]',
            "cost is given, cpu has no choice of tile",
        ),
        ('tier = "core", simt', 'tier = "cor", simt', "row 1: tier is 'cor'; allowed: core, full"),
        ('simt = ["bf16"]', "simt = true", "row 4: simt is True; it must be a list"),
        ('simt = ["bf16"]', 'simt = ["f16"]', "row 4: simt is 'f16'; allowed: bf16$"),
        ('[{ dtypes = ["f32"] }]', '[{ simt = ["f16"] }]', "simt is for kernels of device cuda"),
        (
            '{ dtypes = ["f32"] }',
            "{ head_dims = [64] }",
            r"\[family.cpu\] cpu row 1: .* not use it",
        ),
        ('{ dtypes = ["f32"] }', "3", r"\[family.cpu\]: rows is 3; it must be a dict"),
        # Of several.
        (
            '["f32"], tier',
            '["f32", "f32"], tier',
            r"\[family.slow\]: plain/slow/f32 is listed twice; a row is allowed once",
        ),
        (
            "rows = [\n",
            "kernels = [{}, { alignment = 2 }]\nrows = [\n",
            r"\[family.fast\]: a second kernel is fast; a name is allowed once",
        ),
        ("scores = {", "scores = [", "not TOML"),
    ],
)
def test_a_wrong_manifest_is_refused_by_family(tmp_path, old, new, message):
    assert old in MANIFEST
    with pytest.raises(generate.ManifestError, match=message):
        load(tmp_path, MANIFEST.replace(old, new, 1))
