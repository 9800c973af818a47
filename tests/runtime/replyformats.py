"""Replies as models of each family write them, and what is in them."""

from __future__ import annotations

from typing import NamedTuple

from colibri_mmap.runtime.replies import (
    Content,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "options": {"type": "object"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

BAR, LOW = "\uff5c", "\u2581"  # of DeepSeek's markers


def deepseek(name: str) -> str:
    return f"<{BAR}tool{LOW}{name.replace(' ', LOW)}{BAR}>"


def called(*calls: tuple[str, str] | tuple[str, str, str]) -> list[Piece]:
    """The pieces of calls, each a name, arguments and perhaps an id."""
    pieces: list[Piece] = []
    for index, (name, arguments, *given) in enumerate(calls):
        pieces += [ToolCallStart(index, name, *given), ToolCallArguments(index, arguments)]
    return pieces


class Case(NamedTuple):
    """A reply to a prompt that ends with `prompt`, of a model whose template has `template`."""

    name: str
    template: str
    prompt: str
    reply: str
    pieces: list[Piece]
    model: str = "qwen3moe"
    can_be_imposed: bool = True  # by `call_grammar`, as it stands


PARIS = '{"city": "Paris", "days": 2}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
NOW = '{"name": "now", "arguments": {}}'

CASES = [
    Case(
        "hermes",
        "<tool_call></tool_call></think>",
        "<think>\n",
        f"I need it.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n"
        "</tool_call>",
        [Reasoning("I need it."), *called(("weather", PARIS), ("now", "{}"))],
    ),
    Case(
        "hermes, arguments first",
        "<tool_call></tool_call>",
        "",
        '<tool_call>{"arguments": "{\\"city\\": \\"}\\"}", "name": "weather"}</tool_call> Done.',
        [*called(("weather", '{"city": "}"}')), Content("Done.")],
        can_be_imposed=False,
    ),
    Case(
        "qwen3-coder",
        "<tool_call><function=x><parameter=y>",
        "",
        '<tool_call>\n<function=weather>\n<parameter=city>\nParis "1"\n\nend\n</parameter>\n'
        '<parameter=days>\n2\n</parameter>\n<parameter=options>\n{"a": [1]}\n</parameter>\n'
        "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        called(
            (
                "weather",
                '{"city": "Paris \\"1\\"\\n\\nend", "days": 2, "options": {"a": [1]}, '
                '"note": null}',
            )
        ),
    ),
    Case(
        "qwen3-coder without its outer tag",
        "<tool_call><function=x><parameter=y>",
        "",
        "Let me look.\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n"
        "</tool_call>\n",
        [Content("Let me look."), *called(("weather", '{"city": "12"}'))],
        can_be_imposed=False,
    ),
    Case(
        "seed-oss",
        "<seed:tool_call></seed:think>",
        "<seed:think>",
        "so</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        [Reasoning("so"), *called(("weather", '{"city": "Paris"}'))],
    ),
    Case(
        "glm-4.5",
        "<tool_call><arg_key></think>",
        "<|assistant|>",
        "\n<think>Which city?</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        [
            Reasoning("Which city?"),
            *called(("weather", '{"city": "Paris\\n", "days": 2}'), ("now", "{}")),
        ],
    ),
    Case(
        "minimax-m2",
        "<minimax:tool_call></think>",
        "]~b]ai\n<think>\n",
        'Think.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="unit">C</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [
            Reasoning("Think."),
            *called(("weather", '{"city": "Paris", "unit": "C"}'), ("now", "{}")),
        ],
    ),
    Case(
        "deepseek-v3.2",
        f"{BAR}DSML{BAR} function_calls>",
        "</think>",
        f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="weather">\n'
        f'<{BAR}DSML{BAR}parameter name="city" string="true">7</{BAR}DSML{BAR}parameter>\n'
        f'<{BAR}DSML{BAR}parameter name="days" string="false">7</{BAR}DSML{BAR}parameter>\n'
        f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>",
        called(("weather", '{"city": "7", "days": 7}')),
    ),
    Case(
        "deepseek-v3",
        f"{deepseek('calls begin')} ```json </think>",
        "<think>\n",
        f"Hm.\n</think>\n\nI look.{deepseek('calls begin')}{deepseek('call begin')}function"
        f"{deepseek('sep')}weather\n```json\n{PARIS}\n```{deepseek('call end')}\n"
        f"{deepseek('call begin')}function{deepseek('sep')}now\n```json\n{{}}\n```"
        f"{deepseek('call end')}{deepseek('calls end')}",
        [Reasoning("Hm."), Content("I look."), *called(("weather", PARIS), ("now", "{}"))],
        can_be_imposed=False,
    ),
    Case(
        "deepseek-v3.1",
        deepseek("calls begin"),
        "</think>",
        f"{deepseek('calls begin')}{deepseek('call begin')}weather{deepseek('sep')}{PARIS}"
        f"{deepseek('call end')}{deepseek('calls end')}",
        called(("weather", PARIS)),
    ),
    Case(
        "kimi-k2",
        "<|tool_calls_section_begin|></think>",
        "<|im_middle|>",
        "<think>Two calls.</think><|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            Reasoning("Two calls."),
            *called(("weather", PARIS, "functions.weather:0"), ("now", "{}", "functions.now:1")),
        ],
    ),
    Case(
        "mistral, a list",
        "[TOOL_CALLS]",
        "[/INST]",
        f'[TOOL_CALLS] [{CALL[:-1]}, "id": "123456789"}}, {NOW}]',
        called(("weather", PARIS), ("now", "{}")),
        can_be_imposed=False,
    ),
    Case(
        "mistral, named",
        "[TOOL_CALLS][ARGS][/THINK]",
        "[/INST]",
        f"[THINK]ok[/THINK][TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
        [Reasoning("ok"), *called(("weather", PARIS), ("now", "{}"))],
    ),
    Case(
        "granite-3",
        "<|tool_call|>",
        "",
        f"<|tool_call|>[{CALL}, {NOW}]",
        called(("weather", PARIS), ("now", "{}")),
    ),
    Case(
        "hunyuan",
        "<tool_calls>",
        "",
        f"<tool_calls>[{CALL},{NOW}]</tool_calls>",
        called(("weather", PARIS), ("now", "{}")),
    ),
    Case(
        "llama-3",
        '<|start_header_id|> "parameters": ',
        "",
        f'{{"name": "weather", "parameters": {PARIS}}}',
        called(("weather", PARIS)),
    ),
    Case(
        "llama-3, marked",
        "<|python_tag|>",
        "",
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", '
        '"parameters": {}}',
        called(("weather", PARIS), ("now", "{}")),
        can_be_imposed=False,
    ),
    Case(
        "llama-4",
        "<|header_start|> tools",
        "",
        "[weather(city='Paris [', days=2), now()]",
        called(("weather", '{"city": "Paris [", "days": 2}'), ("now", "{}")),
        can_be_imposed=False,
    ),
    Case(
        "lfm2",
        "<|tool_call_start|>",
        "",
        'Wait.<|tool_call_start|>[weather(city="Paris", days=2)]<|tool_call_end|>Checking.',
        [Content("Wait."), *called(("weather", PARIS)), Content("Checking.")],
        can_be_imposed=False,
    ),
    Case(
        "gpt-oss",
        "<|channel|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>We need <b> it.<|end|><|start|>assistant<|channel|>"
        f"commentary to=functions.weather <|constrain|>json<|message|>{PARIS}",
        [Reasoning("We need <b> it."), *called(("weather", PARIS))],
        model="gpt-oss",
    ),
    Case(
        "gpt-oss, recipient before the channel",
        "<|channel|>",
        "<|start|>assistant",
        f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>",
        called(("weather", PARIS)),
        model="gpt-oss",
        can_be_imposed=False,
    ),
    Case(
        "gpt-oss, preamble and answer",
        "<|channel|>",
        "<|start|>assistant",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>\nIt rains.",
        [Content("I will look.\nIt rains.")],
        model="gpt-oss",
        can_be_imposed=False,
    ),
    Case(
        "gpt-oss, prompt within a message",
        "<|channel|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "It rains.<|end|>",
        [Content("It rains.")],
        model="gpt-oss",
        can_be_imposed=False,
    ),
    Case(
        "reasoning only, cut",
        "</think>",
        "<think>\n",
        "So <tool_call> is what I\n",
        [Reasoning("So <tool_call> is what I\n")],
        can_be_imposed=False,
    ),
    Case(
        "reasoning whose end was forgotten",
        "<tool_call></think>",
        "<think>",
        f"A <tool_call> then. <tool_call>\n{CALL}\n</tool_call>",
        [Reasoning("A <tool_call> then."), *called(("weather", PARIS))],
        can_be_imposed=False,
    ),
    Case(
        "gemma-4's reasoning",
        "<|channel>thought\n<channel|>",
        "<|turn>model\n",
        "<|channel>thought\nHm.\n<channel|>Yes.",
        [Reasoning("Hm."), Content("Yes.")],
        can_be_imposed=False,
    ),
    Case(
        "reasoning switched off",
        "</think>",
        "<think>\n\n</think>\n\n",
        "Yes. <think> is a tag.",
        [Content("Yes. <think> is a tag.")],
        can_be_imposed=False,
    ),
]
