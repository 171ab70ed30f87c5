"""Instruments: they check, time, profile and tune the kernels. The library never imports them."""
