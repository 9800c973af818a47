"""`serve`: models behind the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri_mmap.cli import options
from colibri_mmap.cli.options import count_or_none
from colibri_mmap.errors import ArgumentError, ColibriError

if TYPE_CHECKING:
    from rich.console import Console

    from colibri_mmap.server.hosting import ModelSpec

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def _server(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Server", **settings)


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL",
            help=f"{options.MODEL_HELP} The first is opened at once.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="[NAME=]MODEL",
            help="The same as an option (repeatable).",
            rich_help_panel="Model",
        ),
    ] = None,
    demo: options.Demo = False,
    host: Annotated[
        str, _server("--host", metavar="HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, _server("--port", metavar="N", help="Port to listen on; 0: any.", min=0, max=65535)
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        _server(
            "--api-key",
            metavar="KEY",
            help="Ask clients for this key (repeatable).",
            envvar="COLIBRI_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        _server("--alias", metavar="NAME", help="Another name for the first model (repeatable)."),
    ] = None,
    parallel: Annotated[
        int,
        _server("--parallel", metavar="N", help="Replies made at the same time.", min=1, max=64),
    ] = 4,
    queue: Annotated[
        int, _server("--queue", metavar="N", help="Requests that may wait; more get 429.", min=0)
    ] = 64,
    timeout: Annotated[
        float,
        _server("--timeout", metavar="SECONDS", help="Longest time for a reply; 0: any.", min=0),
    ] = 0.0,
    models_loaded: Annotated[
        int,
        _server("--models-loaded", metavar="N", help="Models open at the same time.", min=1),
    ] = 1,
    cors_origin: Annotated[
        list[str] | None,
        _server(
            "--cors-origin", metavar="URL", help="A web page that may ask; *: all (repeatable)."
        ),
    ] = None,
    cache_ram: Annotated[
        str,
        _server("--cache-ram", metavar="SIZE", help="Memory for conversations that may go on."),
    ] = "1G",
    session_dir: Annotated[
        Path | None,
        _server("--session-dir", metavar="DIR", help="Keep conversations here, over restarts too."),
    ] = None,
    session_disk: Annotated[
        str, _server("--session-disk", metavar="SIZE", help="Disk space for them.")
    ] = "10G",
    ctx_size: options.ContextSize = 0,
    threads: options.Threads = -1,
    mode: options.ArithmeticMode = "int8",
    kv_type: options.KVElementType = None,
    ram: options.Ram = None,
    io: options.Io = None,
    prefetch: options.Prefetch = "auto",
    prefetch_threads: options.PrefetchThreads = -1,
    lfu_weight: options.LfuWeight = 0.3,
    pin: options.Pins = None,
    no_learn: options.NoLearn = False,
    no_profile: options.NoProfile = False,
    vram: options.Vram = "auto",
    gpu_layers: options.GpuLayers = "auto",
    chat_template: options.Template = None,
    chat_template_file: options.TemplateFile = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", metavar="", help="Log each request, and print the traceback of an error."
        ),
    ] = False,
) -> None:
    """Serve models over HTTP.

    /v1/chat/completions, /v1/completions and /v1/models are OpenAI's, /v1/messages is Anthropic's;
    at / there is a page to chat on.
    """
    named = [*(models or ()), *(model or ())]
    if demo:
        from colibri_mmap.cli.opening import demo_model

        named.append(f"demo={demo_model()}")
    specs = _specs(named, alias or ())
    keys = [key for key in api_key or () if key]
    if len(keys) < len(api_key or ()):
        raise ArgumentError("--api-key must not be empty")

    from colibri_mmap.cli.console import messages
    from colibri_mmap.cli.memory import ram_settings, vram_settings
    from colibri_mmap.cli.templates import template_source
    from colibri_mmap.runtime.budget import parse_size
    from colibri_mmap.runtime.engine import Engine
    from colibri_mmap.runtime.limits import memory_limits
    from colibri_mmap.runtime.template import ChatTemplate
    from colibri_mmap.server.app import Settings, create_app
    from colibri_mmap.server.hosting import Progress
    from colibri_mmap.server.loaded import LoadedModel, Serving
    from colibri_mmap.server.running import listen, run

    whole = memory_limits().total
    serving = Serving(
        parallel=parallel,
        queue=queue,
        cache_ram=parse_size(cache_ram, whole),
        session_dir=session_dir,
        session_disk=parse_size(session_disk, whole),
    )
    memory = ram_settings(
        ram=ram,
        io=io,
        prefetch=prefetch,
        prefetch_threads=prefetch_threads,
        lfu_weight=lfu_weight,
        pins=pin,
        no_learn=no_learn,
    )
    gpu = vram_settings(vram, gpu_layers)
    source = template_source(chat_template, chat_template_file)
    if source is not None:
        ChatTemplate(source)  # whose mistakes are found now
    console = messages()

    def open_engine(spec: ModelSpec, progress: Progress) -> Engine:
        return Engine.open(
            spec.path,
            mode=mode,
            threads=count_or_none(threads),
            ctx=ctx_size or None,
            kv_type=kv_type,
            memory=memory,
            gpu=gpu,
            profile=not no_profile,
            parallel=parallel,
            progress=progress,
        )

    def open_model(spec: ModelSpec, progress: Progress) -> LoadedModel:
        try:
            engine = open_engine(spec, progress)
        except ColibriError as error:
            if len(specs) > 1:  # of a single model it ends the program, which tells it
                console.print(f"error: {spec.name}: {error}", style="red", markup=False)
            raise

        def note(notice: str) -> None:
            console.print(f"note: {spec.name}: {notice}", style="dim", markup=False)

        opened = LoadedModel(spec.name, engine, serving, source, note)
        for notice in engine.notices:
            note(notice)
        console.print(f"{spec.name} is open, with {engine.context_length} tokens of context")
        return opened

    settings = Settings(
        keys=keys,
        origins=cors_origin or (),
        timeout=timeout or None,
        most_loaded=models_loaded,
    )
    app = create_app(specs, open_model, settings)
    listening = listen(host, port)
    _announce(console, listening.getsockname(), specs, keys)
    run(app, listening, access_log=verbose)


def _specs(models: Sequence[str], aliases: Sequence[str]) -> list[ModelSpec]:
    """The files that are meant, each checked as far as opening it is cheap, and their names."""
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.server.hosting import ModelSpec

    if not models:
        hint = "name a GGUF file or a pulled model (`colibri-mmap list` shows those), or --demo"
        raise typer.BadParameter(hint, param_hint="'MODEL'")
    specs: list[ModelSpec] = []
    taken: set[str] = set()
    for text in models:
        names, path = _named(text)
        gguf = open_gguf(path)
        names += () if specs else tuple(aliases)
        for each in names:
            if each in taken:
                raise ArgumentError(f"two models are called {each}: name them, as in NAME=MODEL")
            taken.add(each)
        specs.append(ModelSpec(path, names, int(gguf.path.stat().st_mtime)))
    return specs


def _named(text: str) -> tuple[tuple[str, ...], Path]:
    """Names and file of one -m: a given one, or the file's, and what a pulled model is called."""
    from colibri_mmap.runtime.modelstore import resolve_model

    name, equals, rest = text.partition("=")
    if equals and name and "/" not in name and not Path(text).exists():
        return (name,), resolve_model(rest)
    path = resolve_model(text)
    return (_default_name(path), *(() if Path(text).exists() else (text,))), path


def _default_name(path: Path) -> str:
    """A file's name without what says how it is stored."""
    name = path.name if path.is_dir() else path.stem
    return _SHARD.sub("", name) or "model"


def _announce(
    console: Console, address: tuple[Any, ...], specs: Sequence[ModelSpec], keys: Sequence[str]
) -> None:
    """Where the server is, what it serves, and who may use it."""
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(spec.name for spec in specs)
    key = "with an API key" if keys else "no API key"
    url = f"http://{shown}:{port}"
    console.print(f"{url}/v1 serves {names} ({key}); a page to chat on: {url}", markup=False)
    if not keys and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        console.print(
            f"warning: everybody who reaches {shown}:{port} can use the models; --api-key asks for"
            " a key",
            style="yellow",
            markup=False,
        )
