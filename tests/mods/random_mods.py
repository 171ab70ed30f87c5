"""Random score_mods and mask_mods, as text, of the operations that are supported."""

import torch

B, HQ, HKV, SQ, SK, D = 2, 4, 2, 19, 23, 8


def _random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Captured tensors. Python numbers stand in the text.
FLOATS = {
    "PAIRS": _random(HQ, SQ, SK, seed=1),
    "HEADS": _random(HQ, seed=2),
    "ROWS": _random(B, SQ, seed=3),
    "KEYS": _random(B, SK, 2, seed=4),
    "BUCKETS": _random(HQ, 40, seed=5),
    "NUMBER": _random(1, seed=6)[0],
}
OTHERS = {
    "torch": torch,
    "functional": torch.nn.functional,
    "IDS": torch.randint(-5, 6, (B, SK), generator=torch.Generator().manual_seed(7)),
    "SEEN": _random(HQ, SQ, seed=8) > 0,
}


class Writer:
    """Writes expressions of a kind, "float", "int" or "bool", up to a depth. Floats stay within
    what float32 holds with some digits, and are functions of the score most of the time."""

    def __init__(self, choose, has_score=True):
        self.choose = choose
        self.has_score = has_score

    def __call__(self, kind, depth):
        forms = getattr(self, f"_{kind}s")(depth) if depth > 0 else self._leaves(kind)
        return self.choose.choice(forms)()

    def _leaves(self, kind):
        number = self.choose
        if kind == "int":
            texts = [
                "q",
                "k",
                "h",
                "b",
                "(q - k)",
                "IDS[b, k]",
                "(k // 3)",
                str(number.randint(1, 9)),
            ]
        elif kind == "bool":
            texts = [
                "(q >= k)",
                "SEEN[h, q]",
                "(IDS[b, k] > 0)",
                "((q + k) % 3 == 0)",
                "(q // 5 == k // 5)",
            ]
        else:
            texts = ["PAIRS[h, q, k]", "HEADS[h]", "ROWS[b, q]", "ROWS[b][q]", "KEYS[b, k, 1]",
                     "BUCKETS[h, (q - k) % 40]", "BUCKETS[h][abs(q - k)]", "NUMBER",
                     f"({number.uniform(-2, 2):.3f} + 0 * NUMBER)"]  # fmt: skip
            texts += ["s"] * 8 * self.has_score
        return [lambda text=text: text for text in texts]

    def _floats(self, depth):
        x, i, c = (lambda: self("float", depth - 1)), (lambda: self("int", depth - 1)), (
            lambda: self("bool", depth - 1)
        )  # fmt: skip
        calls = [
            "torch." + x for x in ["tanh", "sin", "cos", "sigmoid", "erf", "atan", "relu", "sign"]
        ]
        calls += ["functional." + x for x in ["silu", "softplus", "gelu"]] + ["abs", "-"]
        positive = ["torch.log", "torch.log2", "torch.sqrt", "torch.rsqrt"]
        small = ["torch.exp", "torch.exp2", "torch.expm1"]
        return [
            lambda: f"{self.choose.choice(calls)}({x()})",
            lambda: f"{self.choose.choice(positive)}(abs({x()}) + 0.3)",
            lambda: f"{self.choose.choice(small)}(torch.tanh({x()}))",
            lambda: f"({x()} + {x()})",
            lambda: f"({x()} - {x()})",
            lambda: f"({x()} * {self.choose.uniform(-2, 2):.3f})",
            lambda: f"({self.choose.randint(-3, 3)} - {x()})",
            lambda: f"({x()} * torch.tanh({x()}))",
            lambda: f"({x()} / (1 + abs({x()})))",
            lambda: f"(torch.tanh({x()}) ** {self.choose.choice([2, 3])})",
            lambda: f"((abs({x()}) + 0.5) ** torch.sin({x()}))",
            lambda: f"torch.minimum({x()}, {x()} + 0 * s)" if self.has_score else x(),
            lambda: f"torch.maximum({x()} + 0.0 * PAIRS[h, q, k], {x()} + 0 * ROWS[b, q])",
            lambda: f"torch.clamp({x()} * NUMBER, -1.5, 1.25)",
            lambda: f"torch.where({c()}, {x()}, {x()})",
            lambda: f"({x()} + 0.1 * {i()})",
            lambda: f"({c()} * {x()})",
            lambda: f"BUCKETS[h, ({i()}) % 40]",
            lambda: f"PAIRS[h, ({i()}) % 19, k]",
        ]

    def _ints(self, depth):
        i, c = (lambda: self("int", depth - 1)), (lambda: self("bool", depth - 1))
        return [
            lambda: f"({i()} + {i()})",
            lambda: f"({i()} - {i()})",
            lambda: f"({i()} * {self.choose.randint(-3, 3)})",
            lambda: f"({i()} // {self.choose.choice([-3, -2, 2, 5])})",
            lambda: f"({i()} % {self.choose.choice([-4, 3, 7])})",
            lambda: f"torch.where({c()}, {i()}, {i()})",
            lambda: f"abs({i()} - 3)",
            lambda: f"(({i()}) & 7)",
            lambda: f"(({i()}) ^ q)",
            lambda: f"(({i()}) >> 1)",
        ]

    def _bools(self, depth):
        x, i, c = (lambda: self("float", depth - 1)), (lambda: self("int", depth - 1)), (
            lambda: self("bool", depth - 1)
        )  # fmt: skip
        return [
            lambda: (
                f"({i()} {self.choose.choice(['<', '<=', '>', '>=', '==', '!='])} {i()} + 0 * k)"
            ),
            lambda: f"({x()} > {x()} + 0.0 * ROWS[b, q])",
            lambda: f"({c()} & {c()})",
            lambda: f"({c()} | {c()})",
            lambda: f"({c()} ^ {c()})",
            lambda: f"~{c()}",
        ]


def score_mod(choose, depth=4):
    """The text of a score_mod that does not grow with the score's square."""
    write = Writer(choose)
    forms = [
        lambda: f"s + {write('float', depth)}",
        lambda: write("float", depth),
        lambda: f"torch.where({write('bool', 2)}, {write('float', depth)}, -float('inf'))",
        lambda: f"3.0 * torch.tanh(s / 3.0) + {Writer(choose, False)('float', 2)}",
        lambda: f"s * {choose.uniform(-1, 1):.2f} + {Writer(choose, False)('float', depth)}",
    ]
    return choose.choice(forms)()


def mask_mod(choose, depth=3):
    return Writer(choose, False)("bool", depth)


def function(text, kind="score_mod", at_once=False):
    """The function of one logit; with `at_once` of all of them, where an index in several steps
    would mean something else."""
    text = text.replace("][", ", ") if at_once else text
    arguments = "s, b, h, q, k" if kind == "score_mod" else "b, h, q, k"
    return eval(f"lambda {arguments}: {text}", {**FLOATS, **OTHERS})
