"""How families of models write reasoning and tool calls, and how their chat templates show it.

Each entry follows the template or the documentation of the model named with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from colibri_mmap.runtime.replies.calls import Calls, Tool
from colibri_mmap.runtime.replies.jsoncalls import JsonCalls
from colibri_mmap.runtime.replies.namedcalls import NamedCalls
from colibri_mmap.runtime.replies.pythoncalls import PythonCalls
from colibri_mmap.runtime.replies.reader import Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules
from colibri_mmap.runtime.replies.xmlcalls import XmlCalls


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around reasoning."""

    opening: str
    closing: str


class Dialect(Protocol):
    """One way to write tool calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What calls begin with."""
        ...

    @property
    def markup(self) -> tuple[str, ...]:
        """All markers that the parser has to see."""
        ...

    @property
    def bare(self) -> bool:
        """Whether a reply may begin with calls that nothing introduces."""
        ...

    def parse(self, reader: Reader, opening: str, calls: Calls, known: bool) -> Parsing[bool]:
        """The calls that come next, behind `opening`; False, and nothing taken, if it is none."""
        ...

    def rules(self, rules: Rules, tools: Sequence[Tool], several: bool) -> str | None:
        """The grammar rule of calls, if they can be imposed."""
        ...


THINKING = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|channel>thought\n", "<channel|>"),  # Gemma 4
)

HERMES = JsonCalls("<tool_call>", "</tool_call>", "<tool_call>\n{calls}\n</tool_call>")
TOOL_CALLS_LIST = JsonCalls(  # Hunyuan
    "<tool_calls>", "</tool_calls>", "<tool_calls>{calls}</tool_calls>", listed=True
)
GRANITE_3 = JsonCalls("<|tool_call|>", "", "<|tool_call|>{calls}", listed=True)
LLAMA_3 = JsonCalls(
    "<|python_tag|>", "<|eom_id|>", "{calls}", one=True, parameters_key="parameters", bare=True
)
LLAMA_4 = PythonCalls("<|python_start|>", "<|python_end|>", bare=True)
LLAMA_4_JSON = replace(LLAMA_3, opening="<|python_start|>", closing="<|python_end|>")
LFM_2 = PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")
LFM_2_JSON = JsonCalls(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call_start|>{calls}<|tool_call_end|>",
    listed=True,
)
MISTRAL_LIST = JsonCalls("[TOOL_CALLS]", "", "[TOOL_CALLS]{calls}", listed=True)
MISTRAL_NAMED = NamedCalls(
    section="",
    begin="[TOOL_CALLS]",
    head=r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\s\[{]+))?(?:\[ARGS\])?",
    ends=(),
    section_end="",
    form="[TOOL_CALLS]{name}[ARGS]{arguments}",
    calls_form="{calls}",
    markup=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
KIMI_K2 = NamedCalls(
    section="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>",
    head=(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    ),
    ends=("<|tool_call_end|>",),
    section_end="<|tool_calls_section_end|>",
    form=(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    ),
    calls_form="<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
    markup=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)


def _deepseek(form: str) -> NamedCalls:
    """DeepSeek's calls; the bars in the markers are U+FF5C, the low lines U+2581."""
    markup = tuple(
        f"<\uff5ctool\u2581{name}\uff5c>"
        for name in (
            "calls\u2581begin",
            "call\u2581begin",
            "sep",
            "call\u2581end",
            "calls\u2581end",
        )
    )
    section, begin, separator, end, section_end = markup
    head = rf"\s*(?:function{separator})?(?P<name>[^\s<]+)(?:{separator}|\s*```json)"
    form = form.replace("{begin}", begin).replace("{sep}", separator).replace("{end}", end)
    calls_form = f"{section}{{calls}}{section_end}"
    return NamedCalls(section, begin, head, ("```", end), section_end, form, calls_form, markup)


DEEPSEEK_V3 = _deepseek("{begin}function{sep}{name}\n```json\n{arguments}\n```{end}")
DEEPSEEK_V31 = _deepseek("{begin}{name}{sep}{arguments}{end}")
QWEN_3_CODER = XmlCalls(
    section="<tool_call>",
    begin="<function=",
    head=r"<function=(?P<name>[^>\n]+)>",
    parameter=r"<parameter=(?P<key>[^>\n]+)>",
    parameter_end="</parameter>",
    end="</function>",
    section_end="</tool_call>",
    form="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    calls_form="{calls}",
    parameter_form="<parameter={key}>\n{value}\n</parameter>\n",
    lines=True,
    markup=("<tool_call>", "</tool_call>"),
)
SEED_OSS = XmlCalls(
    section="<seed:tool_call>",
    begin="<function=",
    head=r"<function=(?P<name>[^>\n]+)>",
    parameter=r"<parameter=(?P<key>[^>\n]+)>",
    parameter_end="</parameter>",
    end="</function>",
    section_end="</seed:tool_call>",
    form="<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
    calls_form="{calls}",
    parameter_form="<parameter={key}>{value}</parameter>\n",
    markup=("<seed:tool_call>", "</seed:tool_call>"),
)
GLM_45 = XmlCalls(
    section="<tool_call>",
    begin="",
    head=r"(?P<name>[^\s<{]+)\s*(?=<)",
    parameter=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
    parameter_end="</arg_value>",
    end="</tool_call>",
    section_end="",
    form="<tool_call>{name}\n{parameters}</tool_call>",
    calls_form="{calls}",
    parameter_form="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    markup=(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
)
MINIMAX_M2 = XmlCalls(
    section="<minimax:tool_call>",
    begin="<invoke ",
    head=r'<invoke name="(?P<name>[^"]+)">',
    parameter=r'<parameter name="(?P<key>[^"]+)">',
    parameter_end="</parameter>",
    end="</invoke>",
    section_end="</minimax:tool_call>",
    form='<invoke name="{name}">\n{parameters}</invoke>\n',
    calls_form="<minimax:tool_call>\n{calls}</minimax:tool_call>",
    parameter_form='<parameter name="{key}">{value}</parameter>\n',
    markup=("<minimax:tool_call>", "</minimax:tool_call>"),
)


def _dsml(section: str) -> XmlCalls:
    """The markup of DeepSeek V3.2 and later; values of strings are marked as such."""
    mark = "\uff5cDSML\uff5c"
    return XmlCalls(
        section=f"<{mark}{section}>",
        begin=f"<{mark}invoke ",
        head=rf'<{mark}invoke name="(?P<name>[^"]+)">',
        parameter=(
            rf'<{mark}parameter name="(?P<key>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*>'
        ),
        parameter_end=f"</{mark}parameter>",
        end=f"</{mark}invoke>",
        section_end=f"</{mark}{section}>",
        form=f'<{mark}invoke name="{{name}}">\n{{parameters}}</{mark}invoke>\n',
        calls_form=f"<{mark}{section}>\n{{calls}}</{mark}{section}>",
        parameter_form=(
            f'<{mark}parameter name="{{key}}" string="{{string}}">{{value}}</{mark}parameter>\n'
        ),
        markup=(f"<{mark}{section}>", mark),
    )


DSML_V32 = _dsml("function_calls")
DSML_V4 = _dsml("tool_calls")


class Family(NamedTuple):
    """Models of one kind: texts that all stand in their templates, and their ways to call."""

    shown_by: tuple[str, ...]
    written: Dialect  # what the model was taught
    read: tuple[Dialect, ...] = ()  # what it may write, in the order to try; default: `written`

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """What replies are searched for."""
        return self.read or (self.written,)


# The first family whose texts all stand in a template counts.
FAMILIES = (
    Family(("\uff5cDSML\uff5c", "function_calls>"), DSML_V32),
    Family(("\uff5cDSML\uff5c",), DSML_V4),
    Family(("<minimax:tool_call>",), MINIMAX_M2),
    Family(("<seed:tool_call>",), SEED_OSS),
    Family(("<|tool_calls_section_begin|>",), KIMI_K2),
    Family(("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), DEEPSEEK_V3),
    Family(("<\uff5ctool\u2581calls\u2581begin\uff5c>",), DEEPSEEK_V31),
    Family(("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED, (MISTRAL_LIST, MISTRAL_NAMED)),
    Family(("[TOOL_CALLS]",), MISTRAL_LIST, (MISTRAL_LIST, MISTRAL_NAMED)),
    Family(("<|tool_call_start|>",), LFM_2, (LFM_2_JSON, LFM_2)),
    Family(("<arg_key>",), GLM_45),
    Family(("<function=", "<parameter="), QWEN_3_CODER, (HERMES, QWEN_3_CODER)),
    Family(("<tool_calls>",), TOOL_CALLS_LIST),
    Family(("<tool_call>",), HERMES, (HERMES, QWEN_3_CODER)),
    Family(("<|tool_call|>",), GRANITE_3),
    Family(("<|header_start|>", '"parameters": '), LLAMA_4_JSON, (LLAMA_4_JSON, LLAMA_4)),
    Family(("<|header_start|>", "tool"), LLAMA_4, (LLAMA_4_JSON, LLAMA_4)),
    Family(("<|python_tag|>",), LLAMA_3),
    Family(("<|start_header_id|>", '"parameters": '), LLAMA_3),
)
