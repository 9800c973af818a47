"""Numba kernels on raw addresses."""
