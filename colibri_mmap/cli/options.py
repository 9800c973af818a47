"""The commands' options, named and with defaults as in llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Mode = Literal["int8", "exact"]
KVType = Literal["f16", "f32"]
IoMode = Literal["mmap", "pread", "direct"]


def count_or_none(value: int) -> int | None:
    """An option's number, or None where llama.cpp's -1 asks for the default."""
    return None if value == -1 else value


def _model(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Model", **settings)


def _prompt(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Prompt", **settings)


def _memory(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Memory", **settings)


def _sampling(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Sampling", **settings)


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model as a person named it, by path or by the name it was pulled as, and its first file."""

    text: str
    path: Path

    @property
    def pulled(self) -> bool:
        """It was named as `list` names it."""
        return self.path != Path(self.text)

    @property
    def name(self) -> str:
        """The name of a pulled model, else that of the file."""
        return self.text if self.pulled else self.path.absolute().name


def given_model(argument: str | None, option: str | None) -> GivenModel | None:
    """The model that was named, as an argument or behind -m; BadParameter for both."""
    from colibri_mmap.runtime.modelstore import resolve_model

    if argument is not None and option is not None:
        raise typer.BadParameter(
            f"{argument} is one, and {option} behind -m is another; leave one of them out",
            param_hint="'MODEL'",
        )
    text = option if argument is None else argument
    return None if text is None else GivenModel(text, resolve_model(text))


def needed_model(argument: str | None, option: str | None) -> GivenModel:
    """As `given_model`; BadParameter if none was named."""
    model = given_model(argument, option)
    if model is None:
        raise typer.BadParameter(
            "there is none: name a GGUF file, or a pulled model as `colibri-mmap list` shows it",
            param_hint="'MODEL'",
        )
    return model


MODEL_HELP = (
    "A GGUF file, any shard of a split one, its directory, a packed file, or the name of a pulled "
    "model: owner/name:QUANT."
)
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)
]
ModelOption = Annotated[
    str | None, _model("-m", "--model", metavar="MODEL", help="Another way to name MODEL.")
]
Threads = Annotated[
    int,
    _model("-t", "--threads", metavar="N", help="Compute threads; -1: as tuned, or one per core."),
]
ArithmeticMode = Annotated[
    Mode, _model("--mode", help="int8 is fast; exact computes everything in float32.")
]
Demo = Annotated[bool, _model("--demo", metavar="", help="Use a tiny demonstration model.")]
ContextSize = Annotated[
    int,
    _model(
        "-c", "--ctx-size", metavar="N", min=0, help="Context length in tokens; 0: the model's."
    ),
]
KVElementType = Annotated[
    KVType | None,
    _model("--kv-type", help="Elements of the KV cache (default: f16; f32 with --mode exact)."),
]

Ram = Annotated[
    str | None,
    _memory(
        "--ram",
        metavar="SIZE",
        help="Memory for everything: 8G, or 40% of what there is (default: all but a reserve).",
    ),
]
Io = Annotated[
    IoMode | None,
    _memory("--io", help="How experts are read (default: as tuned, or mmap).", show_default=False),
]
Prefetch = Annotated[
    str,
    _memory(
        "--prefetch",
        metavar="off|auto|N",
        help="Experts of the next layer to guess and read early; auto: as tuned, or off.",
    ),
]
PrefetchThreads = Annotated[
    int,
    _memory(
        "--prefetch-threads",
        metavar="N",
        help="Threads that wait for the disk; -1: as tuned, or 2.",
    ),
]
Vram = Annotated[
    str,
    _memory(
        "--vram",
        metavar="SIZE|auto|off",
        help="GPU memory to use: 6G, or 50% of what there is; auto: all but a reserve, if there is "
        "a GPU.",
    ),
]
GpuLayers = Annotated[
    str,
    _memory(
        "-ngl",
        "--gpu-layers",
        metavar="N|auto",
        help="Layers whose attention and context live on the GPU too, the last ones; auto: as many "
        "as fit beside some experts.",
    ),
]
LfuWeight = Annotated[
    float,
    _memory(
        "--lfu-weight",
        metavar="X",
        help="What is kept: 0 by recency alone, 1 by frequency alone.",
    ),
]
Pins = Annotated[
    list[str] | None,
    _memory(
        "--pin",
        metavar="LAYER:EXPERT",
        help="Experts that stay in memory: 3:17, 0-3:5, by commas (repeatable).",
    ),
]
NoLearn = Annotated[
    bool,
    _memory(
        "--no-learn",
        metavar="",
        help="Neither use nor keep counts of how often experts are used.",
    ),
]
NoProfile = Annotated[bool, _memory("--no-profile", metavar="", help="Ignore what tune found out.")]
TraceFile = Annotated[
    Path | None,
    _memory("--trace", metavar="FILE", help="Append the routing of every token to a file."),
]

Prompt = Annotated[
    str | None,
    _prompt("-p", "--prompt", metavar="TEXT", help="Reply to this once, and exit."),
]
SessionName = Annotated[
    str | None,
    _prompt(
        "--session", metavar="NAME", help="Go on with the conversation of this name, and keep it."
    ),
]
PromptFile = Annotated[
    Path | None,
    _prompt("-f", "--file", metavar="PATH", help="Reply to the text of this file, and exit."),
]
SystemPrompt = Annotated[
    str | None, _prompt("-sys", "--system-prompt", metavar="TEXT", help="System prompt.")
]
Template = Annotated[
    str | None,
    _prompt(
        "--chat-template",
        metavar="NAME|JINJA",
        help="Chat template to use instead of the model's own.",
    ),
]
TemplateFile = Annotated[
    Path | None,
    _prompt("--chat-template-file", metavar="PATH", help="Chat template from a file."),
]

ReplyTokens = Annotated[
    int,
    _sampling(
        "-n",
        "--n-predict",
        metavar="N",
        help="Tokens of a reply at most; -1: until the model ends it.",
    ),
]
Temperature = Annotated[
    float,
    _sampling("--temp", metavar="X", help="Temperature; 0: always the likeliest token."),
]
TopK = Annotated[
    int,
    _sampling("--top-k", metavar="N", help="Only the k likeliest tokens; 0: all."),
]
TopP = Annotated[
    float,
    _sampling(
        "--top-p",
        metavar="X",
        help="Only the likeliest tokens with this total probability; 1: all.",
    ),
]
MinP = Annotated[
    float,
    _sampling(
        "--min-p",
        metavar="X",
        help="Only tokens with this part of the likeliest one's probability; 0: all.",
    ),
]
RepeatPenalty = Annotated[
    float,
    _sampling(
        "--repeat-penalty", metavar="X", help="Penalty of tokens that occurred lately; 1: none."
    ),
]
RepeatLastN = Annotated[
    int,
    _sampling(
        "--repeat-last-n",
        metavar="N",
        help="How many tokens the penalties look back; -1: the whole context.",
    ),
]
PresencePenalty = Annotated[
    float,
    _sampling("--presence-penalty", metavar="X", help="Penalty of tokens that occurred; 0: none."),
]
FrequencyPenalty = Annotated[
    float,
    _sampling(
        "--frequency-penalty", metavar="X", help="Penalty for each occurrence of a token; 0: none."
    ),
]
Seed = Annotated[
    int,
    _sampling("-s", "--seed", metavar="N", help="Seed of the sampling; -1: a new one."),
]
StopTexts = Annotated[
    list[str] | None,
    _sampling("--stop", metavar="TEXT", help="End the reply before this text (repeatable)."),
]
IgnoreEnd = Annotated[
    bool, _sampling("--ignore-eos", metavar="", help="Go on after the model's end of text.")
]
LogitBiases = Annotated[
    list[str] | None,
    _sampling(
        "-l",
        "--logit-bias",
        metavar="ID+X|ID-X",
        help="Make a token likelier or less likely: 15043+1, 15043-inf (repeatable).",
    ),
]

JsonSchema = Annotated[
    str | None,
    _sampling("--json-schema", metavar="JSON", help="Reply with JSON that this schema describes."),
]
JsonSchemaFile = Annotated[
    Path | None,
    _sampling("--json-schema-file", metavar="PATH", help="The JSON schema from a file."),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", metavar="", help="Print statistics, and the traceback of an error."),
]
