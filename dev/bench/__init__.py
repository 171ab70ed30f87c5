"""Times the kernels against those of other libraries."""
