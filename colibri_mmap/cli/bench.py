"""`bench`: how fast this machine reads a prompt and writes a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri_mmap import __version__
from colibri_mmap.cli import options

if TYPE_CHECKING:
    from colibri_mmap.runtime.engine import Engine

PARAGRAPH = (
    "The hummingbird is the smallest of all birds, and the only one that can fly backwards. It "
    "weighs about two grams, less than a coin, yet its heart beats more than a thousand times a "
    "minute. In one day it drinks more nectar than it weighs, from hundreds of flowers, and at "
    "night it lets its body grow cold to live through the hours without food. "
)


def bench(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prompt_tokens: Annotated[
        int, typer.Option("-p", "--n-prompt", metavar="N", min=1, help="Tokens of the prompt.")
    ] = 512,
    reply_tokens: Annotated[
        int, typer.Option("-n", "--n-gen", metavar="N", min=2, help="Tokens of the reply.")
    ] = 64,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Runs to measure.")
    ] = 3,
    threads: options.Threads = -1,
    mode: options.ArithmeticMode = "int8",
    ram: options.Ram = None,
    io: options.Io = None,
    prefetch: options.Prefetch = "auto",
    prefetch_threads: options.PrefetchThreads = -1,
    lfu_weight: options.LfuWeight = 0.3,
    pin: options.Pins = None,
    vram: options.Vram = "auto",
    gpu_layers: options.GpuLayers = "auto",
    no_learn: options.NoLearn = False,
    no_profile: options.NoProfile = False,
    trace: options.TraceFile = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure the speed of a model.

    Each run reads a prompt and writes a reply behind it, from an empty context. A first, short run
    that warms up is not counted.
    """
    given = options.needed_model(model, model_option)

    from colibri_mmap.cli.console import messages, results
    from colibri_mmap.cli.memory import ram_settings, vram_settings
    from colibri_mmap.cli.opening import open_engine

    console = messages()
    memory = ram_settings(
        ram=ram,
        io=io,
        prefetch=prefetch,
        prefetch_threads=prefetch_threads,
        lfu_weight=lfu_weight,
        pins=pin,
        no_learn=no_learn,
    )
    with open_engine(
        given.path,
        mode=mode,
        threads=options.count_or_none(threads),
        ctx=prompt_tokens + reply_tokens,
        memory=memory,
        gpu=vram_settings(vram, gpu_layers),
        profile=not no_profile,
        trace_file=trace,
    ) as engine:
        ids = _prompt(engine, prompt_tokens)
        _measure(engine, ids, 2)
        samples = []
        for number in range(1, repetitions + 1):
            samples.append(_measure(engine, ids, reply_tokens))
            if console.is_terminal:
                console.print(f"run {number} of {repetitions}: {_speeds(samples[-1])}", style="dim")
        report = _report(engine, given, samples)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        results().print(_table(report), soft_wrap=True)


def _prompt(engine: Engine, length: int) -> list[int]:
    """`length` tokens of English text, the same on every machine."""
    once = engine.tokenizer.encode(PARAGRAPH, add_special=False)
    ids: list[int] = engine.tokenizer.encode(PARAGRAPH * (length // len(once) + 2))
    return ids[:length]


def _measure(engine: Engine, ids: list[int], reply_tokens: int) -> dict[str, Any]:
    """The engine's statistics of one run from an empty context."""
    from colibri_mmap import Sampling

    engine.reset()
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    for _ in engine.generate(ids, max_tokens=reply_tokens, sampling=sampling):
        pass
    return engine.stats.as_dict()


def _speeds(sample: dict[str, Any]) -> str:
    prompt, reply = sample["prefill_tokens_per_second"], sample["decode_tokens_per_second"]
    return f"prompt {prompt:.1f}, reply {reply:.1f} tokens/s"


def _report(
    engine: Engine, model: options.GivenModel, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything that the numbers depend on, their medians, and all samples."""
    from colibri_mmap.format.describe import describe
    from colibri_mmap.runtime.simd import FORM

    gpu = engine.device_report()
    names = (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "bytes_read_per_token",
        "expert_hit_rate",
        "wait_share",
        "vram_hit_rate",
        "vram_uploads_per_token",
    )
    return {
        "version": __version__,
        "model": str(model.path),
        "name": model.name,
        "general_name": describe(engine.gguf)["name"],
        "mode": engine.mode,
        "threads": engine.threads,
        "kernels": FORM,
        "memory": asdict(engine.memory),
        "gpu": None if gpu is None else asdict(gpu),
        "prompt_tokens": samples[0]["prompt_tokens"],
        "generated_tokens": samples[0]["generated_tokens"],
        **{name: median(sample[name] for sample in samples) for name in names},
        "samples": samples,
    }


def _table(report: dict[str, Any]) -> Any:
    """The report for people: a row for each kind of work."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), title_justify="left")
    names = filter(None, (report["name"], report["general_name"]))
    settings = (*names, report["mode"], report["kernels"])
    table.title = " · ".join((*settings, f"{report['threads']} threads"))
    table.add_column("tokens/s")
    for name in ("median", "lowest", "highest"):
        table.add_column(name, justify="right")
    for label, count, name in (
        ("prompt", report["prompt_tokens"], "prefill_tokens_per_second"),
        ("reply", report["generated_tokens"], "decode_tokens_per_second"),
    ):
        values = [sample[name] for sample in report["samples"]]
        numbers = (report[name], min(values), max(values))
        table.add_row(f"{label} of {count} tokens", *(f"{number:.1f}" for number in numbers))
    table.caption, table.caption_justify = "\n".join(_remarks(report)) or None, "left"
    return table


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    """Where the experts of the reply were."""
    if gpu := report["gpu"]:
        yield (
            f"{gpu['name']}: {gpu['layers']} layers and {gpu['experts']:,} of "
            f"{gpu['experts_in_all']:,} experts; {report['vram_hit_rate']:.0%} of those chosen for "
            f"the reply were there, {report['vram_uploads_per_token']:.1f} uploaded per token"
        )
    if any(sample["expert_misses"] for sample in report["samples"]):
        yield (
            f"reply: {report['expert_hit_rate']:.0%} of the experts were in memory, "
            f"{report['bytes_read_per_token'] / 1e9:.2f} GB read per token, "
            f"{report['wait_share']:.0%} of the time spent waiting"
        )
