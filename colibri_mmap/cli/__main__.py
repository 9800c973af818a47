"""`python -m colibri_mmap.cli` is the command `colibri-mmap`."""

from colibri_mmap.cli import main

main()
