"""Bytes at rest: GGUF headers, block geometry, expert extents and the packed container."""
