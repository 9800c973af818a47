"""Bytes in motion: mapped weights, kernels, models, tokenizers and the engine."""
