"""Prefix stores in use: requests of one kind of model, through several runs of the program."""

from __future__ import annotations

from pathlib import Path

from toycache import IDS as REPLY
from toycache import Toy

from colibri_mmap.runtime.prefixstore import PrefixStore
from colibri_mmap.runtime.scheduler import Sequence

PLENTY = 1 << 30


class Stores:
    """Stores of one model, and a person who uses them."""

    def __init__(self, toy: Toy, directory: Path | None) -> None:
        self.toy, self.directory = toy, directory
        self.notices: list[str] = []
        self.opened: list[PrefixStore] = []

    def open(
        self, model: str = "toy", ram_bytes: int = PLENTY, disk_bytes: int = PLENTY
    ) -> PrefixStore:
        """A store like that of a process that has just begun."""
        store = PrefixStore(
            self.toy.sequence,
            model,
            ram_bytes=ram_bytes,
            directory=self.directory,
            disk_bytes=disk_bytes,
            length_limit=self.toy.limit,
            notify=self.notices.append,
        )
        self.opened.append(store)
        return store

    def serve(self, store: PrefixStore, ids: list[int], reply: int = 0) -> int:
        """A request with a prompt of these ids, and some tokens of reply; how many were known."""
        sequence = store.take(ids)
        known = len(sequence.ids)
        assert sequence.ids == ids[:known]
        assert known < len(ids)
        self.toy.check(sequence)
        self.read(store, sequence, ids)
        self.toy.extend(sequence, REPLY[:reply], step=1)
        store.give(sequence)
        return known

    def read(self, store: PrefixStore, sequence: Sequence, ids: list[int]) -> None:
        while (known := len(sequence.ids)) < len(ids):
            self.toy.extend(sequence, ids[known : known + 512])
            store.checkpoint(sequence)
