"""Gates: what a good kernel's figures have to be, and where they are read.

    gates.toml      the thresholds, per class of kernel
    thresholds.py   reads them and judges figures
    sass.py         figures of machine code, by cuobjdump
    tile.py         what follows from the tile of an sm80 kernel
    hot_path.py     the usual iteration of a main loop, in machine code
    issue_slots.py  what it takes of an SM of Ada
    ncu.py          figures of a launch, by Nsight Compute

Nothing here imports the rest of the package: tests/sass reads a library before it is installed.
"""
