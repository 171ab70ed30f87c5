"""Instruments for work on the kernels: run from a checkout, not in the wheel.

    python -m dev.check_gates --library libcutlass_attn.so    SASS against gates; ctest runs it
    python -m dev.issue_slots --library libcutlass_attn.so    time of a main loop on each unit
    python -m dev.latent_times --library libcutlass_attn.so   modelled times of latent decoding
    python -m dev.profile                                     Nsight Compute against gates
    python -m dev.accuracy                                    errors of products in 8 bits
    python -m dev.bench                                       times of this and other libraries
    torchrun --nproc_per_node 2 -m dev.context_times          times of several GPUs
    python -m dev.figures result.json                         figures of benchmarks

The package never imports this folder.
"""
