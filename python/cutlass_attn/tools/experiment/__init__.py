"""Measurements for check, bench and tune: problems x implementations -> judged and timed rows.

`problems` and `grids` define the calls, `impls` the implementations. `judge` and `gradients` check
results, `timing` measures, `stats` computes ratios. `runner` makes a `report` of it all, which
`table` prints. docs/benchmarking.md describes the method and the file.
"""
