"""Measurements of `attention` for check and tune: judged and timed rows. dev/bench adds to them.

`problems` defines the calls, `impls` the implementations. `judge` checks results, `timing`
measures, `stats` computes ratios. `runner` makes a `report` of it all, which `table` prints.
docs/benchmarking.md describes the method and the file.
"""
