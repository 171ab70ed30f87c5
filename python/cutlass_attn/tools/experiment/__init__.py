"""Problems x implementations -> judged and timed rows: what check, bench, ladder and tune stand on.

`problems` says what is computed, `impls` by whom, `judge` whether it is right, `timing` how long it
takes and `stats` what is made of the times; `runner` puts them together into a `report`, which
`table` prints and `plot` draws. docs/benchmarking.md describes the method and the file.
"""
