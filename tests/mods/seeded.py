"""score_mods whose C++ the tests of kernels compile: tests/cpp/simt/score_mods.inc is this module's
output.

    python tests/mods/seeded.py > tests/cpp/simt/score_mods.inc
"""

import torch
from cutlass_attn._mods import cpp
from cutlass_attn._mods.derivative import derivative
from cutlass_attn._mods.tracing import trace

B, H, SQ, SK = 2, 2, 70, 70
SLOPES = torch.ones(H)
TABLE = torch.ones(H, SQ, SK)
VISIBLE = torch.ones(H, SQ, SK, dtype=torch.bool)
ENTRIES = torch.ones(B, H, SQ, SK)
DISTANCES = torch.ones(H, 90)
ROWS = torch.ones(SQ)
COLUMNS = torch.ones(B, SK)
CAP, OFFSET = 2.5, 3

SCORE_MODS = {
    "Squared": lambda s, b, h, q, k: s * s * 0.5,
    "Capped": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "Slopes": lambda s, b, h, q, k: s - SLOPES[h] * abs(k - q - OFFSET),
    "Table": lambda s, b, h, q, k: s + TABLE[h, q, k],
    # Infinite, as its derivative is, where causal masks a key, and for queries beyond the last.
    "Steep": lambda s, b, h, q, k: s * torch.where((k <= q + OFFSET) & (q < SQ), 1.0, float("inf")),
    # Its derivative, times a weight near 1, is beyond float16.
    "Inverse": lambda s, b, h, q, k: 1 / s,
    "All": lambda s, b, h, q, k: torch.where(
        VISIBLE[h, q, k],
        CAP * torch.tanh(s / CAP) - SLOPES[h] * abs(k - q - OFFSET) + TABLE[h, q, k],
        -float("inf"),
    ),
}
# With gradients of all that they capture.
CAPTURES = {
    "Added": lambda s, b, h, q, k: (
        s + ENTRIES[b, h, q, k] + SLOPES[h] * (k - q) + ROWS[q] * 2 + COLUMNS[b, k]
    ),
    "Distance": lambda s, b, h, q, k: s + DISTANCES[h, q - k + 20],
    # Infinite where causal masks a key.
    "SteepAdded": lambda s, b, h, q, k: (
        s + SLOPES[h] * torch.where(k <= q + OFFSET, 1.0, float("inf"))
    ),
    "Scaled": lambda s, b, h, q, k: s * SLOPES[h] * ROWS[q] + DISTANCES[h, q - k + 20],
}


def text():
    banner = "// Written by tests/mods/seeded.py; a test compares it with what that writes."
    result = f"{banner}\n\n{cpp.PRELUDE}"
    for name, function in SCORE_MODS.items():
        graph = trace(function, "score_mod")
        found = derivative(graph)
        roots = {"score": graph.result, "grad": found.score}
        result += "\n" + cpp.source(graph, roots, name, found).text
    for name, function in CAPTURES.items():
        graph = trace(function, "score_mod")
        found = derivative(graph, range(len(graph.captures)))
        roots = {"score": graph.result, "grad": found.score}
        result += "\n" + cpp.source(graph, roots, name, found).text
    return result


if __name__ == "__main__":
    print(text(), end="")
