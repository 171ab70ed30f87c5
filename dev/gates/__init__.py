"""Gates: thresholds for a kernel's figures, and how Nsight Compute measures the figures.

gates.toml has the thresholds, per class of kernel. Figures of machine code are read by dev/sass.
"""
