"""The demo model: a small dense model fetched from PyPI and upcycled to a Mixture of Experts."""

from colibri_mmap.demo.model import ensure_demo_model

__all__ = ["ensure_demo_model"]
