"""Gates: what a good kernel's figures have to be, and how Nsight Compute reads them.

gates.toml has the thresholds, per class of kernel. Figures of machine code are read by dev/sass.
"""
