"""The kernels, the only modules that import triton; nothing imports them before a first call."""
