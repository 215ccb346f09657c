"""Attention on the CPU by compiled kernels."""
