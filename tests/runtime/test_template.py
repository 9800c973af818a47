"""Chat templates against what Hugging Face transformers renders, and against hostile ones."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from colibri_mmap.errors import TemplateError
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.template import CHATML, INST, PLAIN, ChatTemplate
from colibri_mmap.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "templates" / "cases.json").read_text())["cases"]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["template"])
def test_renders_what_transformers_renders(case: dict[str, Any]) -> None:
    source = (DATA / "templates" / f"{case['template']}.jinja").read_text()
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    text = template.render(case["messages"], case["add_generation_prompt"], **case["extra"])
    assert text == case["expected"]
    assert template.notices == []


@pytest.mark.parametrize("key", ["llama-dense", "mixtral", "olmoe", "qwen3moe"])
def test_templates_in_model_files_render(key: str) -> None:
    (path,) = (DATA / "mini" / key).glob(f"{key}.*16.gguf")
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    template = ChatTemplate.of(tokenizer)
    assert template.source == tokenizer.chat_template
    assert "Hello" in template.render([USER])


def test_a_given_template_replaces_the_model_s_own() -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(DATA / "mini" / "mixtral" / "mixtral.F16.gguf"))
    template = ChatTemplate.of(tokenizer, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert template.render([USER]) == "<s>Hello</s>"
    assert template.notices == []


def test_a_model_without_a_template_gets_one_that_suits_it(tmp_path: Path) -> None:
    for model, source, name in (
        ("qwen3-dense/qwen3-dense.BF16.gguf", CHATML, "ChatML"),
        ("mixtral/mixtral.F16.gguf", INST, r"the \[INST\] form"),
        ("olmoe/olmoe.F16.gguf", PLAIN, "a plain transcript"),
    ):
        # The same file with the key renamed, so that it counts as missing.
        content = (DATA / "mini" / model).read_bytes()
        key = b"tokenizer.chat_template"
        assert content.count(key) == 1
        path = tmp_path / "model.gguf"
        path.write_bytes(content.replace(key, b"tokenizer.chat_templat_"))
        template = ChatTemplate.of(Tokenizer.from_gguf(open_gguf(path)))
        assert template.source == source
        assert re.search(name, template.notices[0])


def test_substitutes_render_a_conversation() -> None:
    turns = [USER, ANSWER, {"role": "user", "content": "Bye"}]
    assert ChatTemplate(CHATML).render(turns) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    inst = ChatTemplate(INST, bos="<s>", eos="</s>")
    assert inst.render(turns) == "<s>[INST] Hello [/INST] Hi</s>[INST] Bye [/INST]"
    assert ChatTemplate(PLAIN).render(turns) == (
        "User: Hello\n\nAssistant: Hi\n\nUser: Bye\n\nAssistant:"
    )


@pytest.mark.parametrize(
    "source",
    [
        NO_SYSTEM + "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}",
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endfor %}",
    ],
    ids=["refuses", "leaves out"],
)
def test_a_system_message_without_a_place_is_folded(source: str) -> None:
    template = ChatTemplate(source)
    for _ in range(2):
        text = template.render([SYSTEM, USER, ANSWER])
        assert text == "[user: Be brief.\n\nHello][assistant: Hi]"
    assert len(template.notices) == 1
    assert "no system role" in template.notices[0]


def test_other_refusals_are_reported() -> None:
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ raise_exception('two\nmany') }}{% endif %}"
    )
    with pytest.raises(TemplateError, match=r"^the chat template refuses .*: two many$"):
        template.render([USER, ANSWER])
    with pytest.raises(TemplateError, match="refuses"):
        template.render([SYSTEM, ANSWER])


def test_messages_are_not_changed() -> None:
    messages = [SYSTEM.copy(), USER.copy()]
    ChatTemplate(NO_SYSTEM + "{{ messages[0].content }}").render(messages)
    assert messages == [SYSTEM, USER]


def test_products_of_reasonable_size_are_fine() -> None:
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 * 3 }}{{ [1] * 2 }}").render([]) == "---6[1, 1]"


def test_strftime_now_is_the_local_time() -> None:
    before = datetime.now().replace(microsecond=0)
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}").render([])
    assert before <= datetime.strptime(text, "%Y-%m-%d %H:%M:%S") <= datetime.now()


def test_tojson_escapes_nothing_but_json() -> None:
    template = ChatTemplate("{{ value | tojson }}|{{ value | tojson(indent=1) }}")
    text = template.render([], value={"b": "<ä> & 'x'", "a": None})
    assert text == '{"b": "<ä> & \'x\'", "a": null}|{\n "b": "<ä> & \'x\'",\n "a": null\n}'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for x in %}", "invalid: .*line 1"),
        ("a\n{{ undefined_function() }}", "failed: 'undefined_function' is undefined"),
        ("{{ messages[7].content.x }}", "failed: .* has no element 7"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*unsafe"),
        ("{{ raise_exception.__globals__.keys() }}", "failed: .*unsafe"),
        ("{{ messages.append(1) }}", "failed: .*unsafe"),
        ("{{ messages[0].update(role='system') }}", "failed: .*unsafe"),
        ("{% include '/etc/passwd' %}", "failed: no loader"),
        ("{{ 'x' * 1000000000 }}", "failed: .*exceeds"),
        ("{{ 100000000 * [1] }}", "failed: .*exceeds"),
        ("{{ 9 ** 99999999 }}", "failed: powers"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed: powers"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "failed: .*loops more than"),
        (
            "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
            "failed: .*loops more than",
        ),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "failed: .*recursion"),
        ("{{ value | tojson }}", "failed: .*not JSON serializable"),
    ],
)
def test_bad_templates_fail_with_one_line(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        ChatTemplate(source).render([USER], value=object())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tmpl_loop", "tmpl_ssti"])
def test_hostile_templates_are_contained(file: str) -> None:
    metadata = open_gguf(DATA / "hostile" / f"{file}.gguf").metadata
    source = metadata["tokenizer.ggml.chat_template"]
    assert isinstance(source, str)
    with pytest.raises(TemplateError, match=r"loops more than|unsafe"):
        ChatTemplate(source).render([USER])
