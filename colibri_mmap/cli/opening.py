"""Opening a model for a command: progress where it takes time, notices on stderr."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_mmap.cli.console import ProgressBar, messages, printable, silent_keyboard
from colibri_mmap.cli.options import KVType, Mode

DEMO = "demo: SmolLM2-135M upcycled to a Mixture of Experts, not a capable assistant"

if TYPE_CHECKING:
    from colibri_mmap.runtime.engine import Engine
    from colibri_mmap.runtime.ram import RamSettings
    from colibri_mmap.runtime.vramsettings import VramSettings


def open_engine(
    model: Path,
    *,
    mode: Mode,
    threads: int | None = None,
    ctx: int | None = None,
    kv_type: KVType | None = None,
    memory: RamSettings | None = None,
    gpu: VramSettings | None = None,
    profile: bool = True,
    trace_file: Path | None = None,
) -> Engine:
    """`Engine.open` with a progress bar; what it had to note goes to stderr."""
    # Code and vocabulary are hundreds of thousands of objects and no garbage: looking for some took
    # a tenth of the time to the first token.
    gc.disable()
    try:
        from colibri_mmap import Engine

        with silent_keyboard(), ProgressBar() as bar:
            engine = Engine.open(
                model,
                mode=mode,
                threads=threads,
                ctx=ctx,
                kv_type=kv_type,
                memory=memory,
                gpu=gpu,
                profile=profile,
                trace_file=trace_file,
                progress=bar,
            )
    finally:
        gc.freeze()
        gc.enable()
    tell_notices(engine)
    return engine


def tell_notices(engine: Engine) -> None:
    """Print what the engine has to say that was not printed yet, to stderr."""
    console = messages()
    while engine.notices:
        notice = engine.notices.pop(0)
        console.print(printable(f"note: {notice}"), style="dim", markup=False)


def demo_model() -> Path:
    """The demonstration model, fetched and built on first use."""
    from colibri_mmap.demo import ensure_demo_model

    with silent_keyboard(), ProgressBar("bytes", announce=True) as bar:
        model = ensure_demo_model(progress=bar)
    messages().print(DEMO, style="dim")
    return model
