"""A small set of combinations in which every pair of values of any two factors occurs together."""

from __future__ import annotations

import itertools
import random


def pairwise(factors, seed, given=()):
    """Rows {factor: value} that cover all pairs of `factors`, {name: values}; greedy and seeded.
    Without pairs in rows of `given` that these factors have: something else covers them.

    Each row starts from a pair that is not covered yet and takes, factor by factor in random order,
    the value that covers most more; the best of 20 such rows is kept.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    for row in given:
        if all(row.get(name) in values for name, values in factors.items()):
            missing -= _pairs({name: values.index(row[name]) for name, values in factors.items()})
    rows = []
    while missing:
        candidates = [_row(factors, sorted(map(sorted, missing)), missing, rng) for _ in range(20)]
        best = max(candidates, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


def _row(factors, ordered, missing, rng):
    row = dict(rng.choice(ordered))
    rest = [name for name in factors if name not in row]
    rng.shuffle(rest)
    for name in rest:
        gains = [
            sum(frozenset({(name, value), item}) in missing for item in row.items())
            for value in range(len(factors[name]))
        ]
        best = max(gains)
        row[name] = rng.choice([value for value, gain in enumerate(gains) if gain == best])
    return row


def _pairs(row):
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
