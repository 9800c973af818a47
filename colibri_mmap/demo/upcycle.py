"""Upcycling: a dense llama-type GGUF becomes a Mixture of Experts that behaves like it.

Each expert is the dense feed-forward layer with its block scales changed a little; the router's
weights sum to one, so that any choice of experts comes close to the dense output (Komatsuzaki et
al., "Sparse Upcycling", arXiv 2212.05055).

The router is random, but fitted in two ways to what it will read. The mean of a layer's inputs
holds a third of their energy and would choose the same experts for every token: the rows are
orthogonal to it. And they are scaled so that the logits have a standard deviation of one.

Shapes: E experts, C width of the model, F width of the feed-forward layer.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import numpy as np

from colibri_mmap.demo.dense import FFN_PARTS, DenseModel, Floats
from colibri_mmap.demo.perturb import perturbed
from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.format.arrays import GGUFArray, ValueType
from colibri_mmap.format.encode import TensorEntry, encode_header, encode_number, encode_text
from colibri_mmap.format.header import DEFAULT_ALIGNMENT, TensorInfo, read_header
from colibri_mmap.format.quants import GGMLType

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

FIRST_TOKENS = 4
"""Left out of the averages: the first tokens of a text collect attention and are not typical."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to upcycle: number of experts, experts per token, size of the perturbation, seed."""

    experts: int = 8
    top_k: int = 2
    perturbation: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.experts <= 1024:
            raise ArgumentError(f"experts must be from 2 to 1024, not {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise ArgumentError(f"top-k must be from 1 to {self.experts}, not {self.top_k}")
        if not 0 < self.perturbation <= 0.5:
            raise ArgumentError(f"perturbation must be in (0, 0.5], not {self.perturbation}")


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor to write: `shape` in ggml order, `pieces` makes its bytes."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[bytes]]

    @property
    def padding(self) -> int:
        return -self.nbytes % DEFAULT_ALIGNMENT


def upcycle(
    source: Path, target: Path, recipe: Recipe, *, progress: Progress | None = None
) -> None:
    """Write the Mixture of Experts made from the dense model `source` to `target`, atomically.

    In memory are one expert's matrix at a time and, while the routers are fitted, one layer.
    """
    if not target.parent.is_dir():
        raise ArgumentError(f"{target.parent}: no such directory; create it first")
    partial = target.with_name(f".{target.name}.partial")
    with DenseModel(source) as model:
        if target.exists() and any(target.samefile(s.path) for s in model.gguf.shards):
            raise ArgumentError(f"{target}: is the source itself; name another target")
        outputs = _outputs(model, recipe)
        header = _header(model, recipe, outputs)
        total = len(header) + sum(output.nbytes + output.padding for output in outputs)
        free = shutil.disk_usage(target.parent).free
        if total > free:
            raise ResourceError(
                f"{target}: needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
                "free some space or name another disk"
            )
        try:
            with partial.open("wb") as file:
                _write(file, header, outputs, total, progress)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except OSError as error:
            raise ResourceError(f"{target}: writing failed: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)


def router_rows(inputs: Floats, experts: int, rng: np.random.Generator) -> Floats:
    """Random rows [E, C], orthogonal to the mean of `inputs` [T, C], with logits of deviation 1."""
    rows = rng.standard_normal((experts, inputs.shape[1]), np.float32)
    direction = inputs.mean(axis=0)
    direction /= np.linalg.norm(direction)
    rows -= np.outer(rows @ direction, direction)
    rows /= (inputs @ rows.T).std(axis=0)[:, None]
    return rows


def calibration_ids(vocabulary: list[str]) -> list[int]:
    """Ids of the words of a sample text that the vocabulary holds as one token, BPE or SPM alike.

    Random ids where it holds hardly any.
    """
    text = resources.files("colibri_mmap.demo").joinpath("sample.txt").read_text("utf-8")
    index = {token: position for position, token in enumerate(vocabulary)}
    ids: list[int] = []
    for word in re.findall(r"\w+|[^\w\s]", text):
        spellings = ("Ġ" + word, "▁" + word, word) if word.isalnum() else (word,)
        ids += [index[spelling] for spelling in spellings if spelling in index][:1]
    if len(ids) < 64:
        ids = [int(id) for id in np.random.default_rng(0).integers(0, len(vocabulary), 256)]
    return ids


def _outputs(model: DenseModel, recipe: Recipe) -> list[_Output]:
    """The tensors to write, in the source's order; feed-forward matrices become stacks."""
    parts = {
        f"blk.{layer}.{part}.weight": (layer, position, part)
        for layer in range(model.layers)
        for position, part in enumerate(FFN_PARTS)
    }
    routers = _routers(model, recipe)
    outputs = []
    for name, info in model.gguf.tensors.items():
        if name not in parts:
            outputs.append(_copy(model, info))
            continue
        layer, position, part = parts[name]
        if position == 0:
            outputs.append(_router(layer, routers[layer]))
        seeds = (recipe.seed, layer, position)
        outputs.append(_stack(model, info, f"blk.{layer}.{part}_exps.weight", recipe, seeds))
    return outputs


def _routers(model: DenseModel, recipe: Recipe) -> list[Floats]:
    """The router matrix [E, C] of every layer, fitted to the dense model's own activations."""
    tokens = model.gguf.metadata.get("tokenizer.ggml.tokens")
    vocabulary = tokens.tolist() if isinstance(tokens, GGUFArray) else []
    ids = calibration_ids(vocabulary or [""] * model.info("token_embd.weight").shape[1])
    return [
        router_rows(inputs[FIRST_TOKENS:], recipe.experts, _rng(recipe.seed, layer))
        for layer, inputs in enumerate(model.ffn_inputs(ids))
    ]


def _rng(*seeds: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seeds))


def _copy(model: DenseModel, info: TensorInfo) -> _Output:
    def pieces() -> Iterator[bytes]:
        yield model.raw(info.name)

    return _Output(info.name, info.type, info.shape, info.nbytes, pieces)


def _router(layer: int, rows: Floats) -> _Output:
    def pieces() -> Iterator[bytes]:
        yield rows.tobytes()

    name = f"blk.{layer}.ffn_gate_inp.weight"
    return _Output(name, GGMLType.F32, rows.shape[::-1], rows.nbytes, pieces)


def _stack(
    model: DenseModel, info: TensorInfo, name: str, recipe: Recipe, seeds: tuple[int, ...]
) -> _Output:
    def pieces() -> Iterator[bytes]:
        blocks = model.raw(info.name)
        for expert in range(recipe.experts):
            yield perturbed(blocks, info.type, recipe.perturbation, _rng(*seeds, expert)).tobytes()

    shape = (*info.shape, recipe.experts)
    return _Output(name, info.type, shape, info.nbytes * recipe.experts, pieces)


def _header(model: DenseModel, recipe: Recipe, outputs: list[_Output]) -> bytes:
    """A GGUF v3 header with the source's metadata copied byte for byte, and what makes it a MoE."""
    texts = {
        "general.name": f"{_name(model)} upcycled to {recipe.experts} experts",
        "general.description": (
            f"Each of the {recipe.experts} experts is the dense feed-forward layer with its block "
            f"scales changed by up to {recipe.perturbation:g}; seed {recipe.seed}."
        ),
    }
    numbers = {"llama.expert_count": recipe.experts, "llama.expert_used_count": recipe.top_k}
    replaced = {*texts, *numbers, "general.alignment"}
    source = read_header(model.gguf.shards[0].path)
    pairs = [
        bytes(source.window[start:end])
        for key, (start, end) in source.spans.items()
        if key not in replaced and not key.startswith("split.")
    ]
    string = ValueType.STRING.to_bytes(4, "little")
    pairs += [encode_text(key) + string + encode_text(text) for key, text in texts.items()]
    pairs += [encode_number(key, ValueType.UINT32, number) for key, number in numbers.items()]
    entries, offset = [], 0
    for output in outputs:
        entries.append(TensorEntry(output.name, output.type, output.shape, offset))
        offset += output.nbytes + output.padding
    return encode_header(pairs, entries, DEFAULT_ALIGNMENT)


def _name(model: DenseModel) -> str:
    name = model.gguf.metadata.get("general.name")
    return name if isinstance(name, str) else model.path.stem


def _write(
    file: BinaryIO, header: bytes, outputs: list[_Output], total: int, progress: Progress | None
) -> None:
    file.write(header)
    done = len(header)
    for output in outputs:
        for piece in output.pieces():
            done += file.write(piece)
            if progress is not None:
                progress(done, total)
        done += file.write(bytes(output.padding))
    assert done == total
