"""The demo model: a small dense model fetched from PyPI and upcycled to a Mixture of Experts."""
