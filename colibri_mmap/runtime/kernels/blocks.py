"""Helpers shared by the kernel files: how the fields of a quantised block are unpacked."""
