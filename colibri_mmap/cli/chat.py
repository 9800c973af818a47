"""`chat`: talk to a model in the terminal, or get one reply in a pipe."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from colibri_mmap.cli import options
from colibri_mmap.cli.options import count_or_none
from colibri_mmap.cli.templates import decoded, template_source
from colibri_mmap.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_mmap.cli.conversation import Conversation
    from colibri_mmap.cli.reply import ReplySettings
    from colibri_mmap.cli.session import Session
    from colibri_mmap.runtime.engine import Engine

NO_MODEL = """\
error: no model given
  colibri-mmap chat -m model.gguf   chat with a GGUF file, any shard of a split one, or a directory
  colibri-mmap pull owner/name      fetch a model from the Hugging Face hub; -m takes its name, too
  colibri-mmap chat --demo          fetch a tiny demonstration model (about 100 MB, once)"""


def chat(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    demo: options.Demo = False,
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
    vram: options.Vram = "auto",
    gpu_layers: options.GpuLayers = "auto",
    no_learn: options.NoLearn = False,
    no_profile: options.NoProfile = False,
    trace: options.TraceFile = None,
    session: options.SessionName = None,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    system_prompt: options.SystemPrompt = None,
    chat_template: options.Template = None,
    chat_template_file: options.TemplateFile = None,
    n_predict: options.ReplyTokens = -1,
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    repeat_penalty: options.RepeatPenalty = 1.0,
    repeat_last_n: options.RepeatLastN = 64,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = -1,
    stop: options.StopTexts = None,
    ignore_eos: options.IgnoreEnd = False,
    logit_bias: options.LogitBiases = None,
    json_schema: options.JsonSchema = None,
    json_schema_file: options.JsonSchemaFile = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model.

    In a terminal it is a conversation. With -p, -f or text on standard input it is one reply on
    standard output.
    """
    given = options.given_model(model, model_option)
    if given is None and not demo:
        print(NO_MODEL, file=sys.stderr)
        raise typer.Exit(2)
    if given is not None and demo:
        raise ArgumentError("--demo brings its own model: leave out the other one, or --demo")
    if model is not None and given is not None and not given.path.exists():
        raise ArgumentError(f"{model}: no such file; what to say to a model goes behind -p")
    message = _one_shot_message(prompt, file)
    if as_json and message is None:
        raise ArgumentError("--json prints a single reply: add -p, -f or text on standard input")

    from colibri_mmap import Sampling
    from colibri_mmap.cli.conversation import Conversation
    from colibri_mmap.cli.memory import ram_settings, vram_settings
    from colibri_mmap.cli.opening import demo_model, open_engine
    from colibri_mmap.cli.reply import ReplySettings
    from colibri_mmap.cli.schemas import json_grammar
    from colibri_mmap.cli.session import Session
    from colibri_mmap.runtime.template import ChatTemplate

    sampling = Sampling(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=count_or_none(seed),
        stop=tuple(stop or ()),
        logit_bias=dict(_bias(text) for text in logit_bias or ()),
        ignore_eos=ignore_eos,
    )
    grammar = json_grammar(json_schema, json_schema_file)
    kept = Session(session) if session is not None else None
    conversation = kept.conversation if kept is not None else Conversation()
    if system_prompt is not None:
        conversation = replace(conversation, system=system_prompt)
    source = template_source(chat_template, chat_template_file)
    memory = ram_settings(
        ram=ram,
        io=io,
        prefetch=prefetch,
        prefetch_threads=prefetch_threads,
        lfu_weight=lfu_weight,
        pins=pin,
        no_learn=no_learn,
    )
    path = demo_model() if given is None else given.path
    with (
        open_engine(
            path,
            mode=mode,
            threads=count_or_none(threads),
            ctx=ctx_size or None,
            kv_type=kv_type,
            memory=memory,
            gpu=vram_settings(vram, gpu_layers),
            profile=not no_profile,
            trace_file=trace,
        ) as engine,
        kept.attached(engine) if kept is not None else nullcontext(),
    ):
        template = None
        if source is not None:
            template = ChatTemplate.of(engine.tokenizer, source)
        settings = ReplySettings(sampling, count_or_none(n_predict), template, grammar)
        if message is not None:
            asked = conversation.asking(message)
            _reply_once(engine, asked, kept, settings, as_json=as_json, verbose=verbose)
            return
        from colibri_mmap.cli.interactive import Interactive

        Interactive(engine, settings, conversation, kept).run()


def _one_shot_message(prompt: str | None, file: Path | None) -> str | None:
    """What -p, -f and a piped stdin say, in this order; None in a terminal without -p and -f."""
    parts = [] if prompt is None else [prompt]
    if file is not None:
        parts.append(decoded(file.read_bytes(), str(file)))
    if not sys.stdin.isatty():
        parts.append(decoded(sys.stdin.buffer.read(), "standard input"))
    elif not parts:
        return None
    message = "\n\n".join(part for part in (part.rstrip("\n") for part in parts) if part)
    if not message:
        raise ArgumentError("there is nothing to reply to: the prompt is empty")
    return message


def _bias(text: str) -> tuple[int, float]:
    """Token id and bias of one --logit-bias, as llama.cpp writes it: `15043+1`, `15043-inf`."""
    match = re.fullmatch(r"(\d+)([+-](?:inf|\d+\.?\d*|\.\d+))", text)
    if match is None:
        raise ArgumentError(f"--logit-bias {text}: expected TOKEN_ID+BIAS or TOKEN_ID-BIAS")
    return int(match[1]), float(match[2])


def _reply_once(
    engine: Engine,
    conversation: Conversation,
    session: Session | None,
    settings: ReplySettings,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print the reply to stdout and nothing else there; statistics go to stderr."""
    from colibri_mmap.cli.console import messages, printable
    from colibri_mmap.cli.liveline import LiveLine
    from colibri_mmap.cli.opening import tell_notices
    from colibri_mmap.cli.reply import full_context_hint, progress_line, stream_reply, summary

    with LiveLine(lambda: progress_line(engine)) as line:

        def write(text: str, reasons: bool) -> None:
            if sys.stdout.isatty() and not as_json:
                line.write(printable(text), dim=reasons)
            elif not as_json and not reasons:
                line.write(text)

        reply = stream_reply(engine, conversation.messages(), settings, write)
    if as_json:
        reasoning = {"reasoning": reply.reasoning} if reply.reasoning else {}
        print(json.dumps({"reply": reply.text, **reasoning, "stats": engine.stats.as_dict()}))
    elif not reply.text.endswith("\n"):
        print(flush=True)
    console = messages()
    if session is not None and reply.text:
        session.keep(conversation.answered(reply.text))
    if reply.interrupted:
        raise KeyboardInterrupt
    tell_notices(engine)
    if engine.stats.finish_reason == "context":
        console.print(f"note: {full_context_hint(engine)}", markup=False)
    if verbose or (console.is_terminal and sys.stdout.isatty()):
        console.print(summary(engine), style="dim")
