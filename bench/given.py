"""One engine reads given tokens: a prompt at once, then one after another; prints what each cost.

Which token comes next does not depend on what the engine computes, so that two engines do the same
work. With --peer it is llama.cpp without repacking, in an interpreter that lacks this package.

    .venv/bin/python bench/given.py MODEL.gguf IDS.json --prompt 64 --set ram=2G
    PEER/bin/python bench/given.py MODEL.gguf IDS.json --prompt 64 --peer
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

Step = Callable[[list[int]], object]
Counts = Callable[[], dict[str, float]]
"""What an engine itself counted since the last call."""


def counters() -> dict[str, float]:
    """Seconds, bytes this process read from disk, and its page faults, all so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        "seconds": time.perf_counter(),
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "bytes_read": int(io["read_bytes"]),
        "major_faults": usage.ru_majflt,
        "minor_faults": usage.ru_minflt,
    }


def phase(before: dict[str, float], tokens: int) -> dict[str, float]:
    """What happened since `before`, in total and by token."""
    now = counters()
    used = {name: now[name] - before[name] for name in now}
    return used | {
        "tokens": tokens,
        "tokens_per_second": tokens / used["seconds"],
        "bytes_read_per_token": used["bytes_read"] / tokens,
    }


def read(step: Step, ids: list[int], prompt: int, seconds: float, counts: Counts) -> dict[str, Any]:
    """Costs of the prompt and of the single tokens behind it, which end after `seconds`."""
    before = counters()
    step(ids[:prompt])
    report = {"prefill": phase(before, prompt) | counts()}
    before, done = counters(), 0
    while done < len(ids) - prompt and time.perf_counter() - before["seconds"] < seconds:
        step([ids[prompt + done]])
        done += 1
    return report | ({"decode": phase(before, done) | counts()} if done else {})


def ours(arguments: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    from colibri_mmap import Engine, __version__
    from colibri_mmap.runtime.engine import _MAINTAIN_EVERY
    from colibri_mmap.runtime.kv import Trace
    from colibri_mmap.runtime.ram import RamSettings
    from colibri_mmap.runtime.tracefile import TraceHeader, TraceWriter

    kinds = {"prefetch": int, "prefetch_threads": int, "lfu_weight": float}
    options = dict(setting.split("=", 1) for setting in arguments.set)
    chosen = {name: kinds.get(name, str)(text) for name, text in options.items()}
    memory = RamSettings(**chosen, learn=False)  # every run starts alike
    before = counters()
    with ExitStack() as stack:
        engine = stack.enter_context(
            Engine.open(
                arguments.model,
                threads=arguments.threads,
                ctx=len(ids),
                memory=memory,
                profile=False,
            )
        )
        tier, sequence = engine._tier, engine._sequence
        assert tier is not None
        assert tier.pager is not None, "a model without experts needs no memory tier"
        pager = tier.pager
        report: dict[str, Any] = {
            "engine": f"colibri-mmap {__version__}",
            "kv_bytes": sequence.cache._memory.bytes.size,
            "reserve_bytes": tier.plan.reserve,
            "open": phase(before, 1),
        }
        writer = None
        if arguments.trace is not None:
            writer = stack.enter_context(TraceWriter(arguments.trace, TraceHeader.of(engine.gguf)))

        def step(part: list[int]) -> None:
            """As Engine.generate does it, but for the choice of the token."""
            trace = Trace()
            engine._step(sequence, part, "last", trace)
            if len(sequence.ids) % _MAINTAIN_EVERY == 1:
                tier.maintain()
            if writer is not None:
                writer.write(trace.experts)

        def counts() -> dict[str, float]:
            return asdict(pager.take_stats())

        return report | read(step, ids, arguments.prompt, arguments.seconds, counts)


def peers(arguments: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    import llama_cpp
    from peer import Peer

    before = counters()
    with Peer(arguments.model, threads=arguments.threads, repack=False, ctx=len(ids)) as peer:
        report: dict[str, Any] = {
            "engine": f"llama-cpp-python {llama_cpp.__version__}",
            "open": phase(before, 1),
        }
        return report | read(peer.decode, ids, arguments.prompt, arguments.seconds, dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="JSON list of token ids, prompt and all")
    parser.add_argument("--prompt", type=int, default=64, help="how many are read at once, <= 512")
    parser.add_argument("--seconds", type=float, default=1e9, help="for the single tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help="llama.cpp instead of this engine")
    parser.add_argument("--trace", type=Path, help="file to append this engine's routing to")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    ids = json.loads(arguments.ids.read_text())
    print(json.dumps((peers if arguments.peer else ours)(arguments, ids)))


if __name__ == "__main__":
    main()
