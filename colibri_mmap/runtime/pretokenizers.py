"""How each family of byte-level BPE tokenizers cuts text into words before merging.

`tokenizer.ggml.pre` names the rule. The patterns are those the model authors publish in their
tokenizer files (`tokenizer.json`, or `pat_str` for tiktoken); where llama.cpp approximates one, the
published one is kept. Several patterns are applied one after another, each cutting the pieces the
previous one left.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"

# Letters in capital-then-small order, as introduced by o200k; `%s` takes a further condition.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]"
_CASED_WORD = (
    r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{tail}"
)


def _cl100k(digits: str, *, letters: str = r"\p{L}+", symbols: str = r"[^\s\p{L}\p{N}]+") -> str:
    """The cl100k shape: contractions, words with one leading mark, digits, symbols, spaces."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
        rf"| ?{symbols}[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _o200k(digits: str, *, tail: str, line_end: str = r"[\r\n/]*", condition: str = "") -> str:
    """The o200k shape: like cl100k, with words cut where small letters turn into capitals."""
    words = _CASED_WORD.format(upper=_UPPER % condition, lower=_LOWER % condition, tail=tail)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{line_end}|\s*[\r\n]+|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_ONE_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_LLAMA3 = _cl100k(_THREE_DIGITS)
_QWEN2 = _cl100k(_ONE_DIGIT)
_GPT4O = _o200k(_THREE_DIGITS, tail=_CONTRACTION + "?")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_IDEOGRAPHS_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
# DeepSeek's list of letters: cased ones, but for small Armenian and Georgian and mathematical ones.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _IDEOGRAPHS_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS_AND_HANGUL, _ONE_DIGIT)
_DEEPSEEK_V3 = (_THREE_DIGITS, _CJK, _MARKED_WORDS)
_KIMI_K2 = r"\p{Han}+|" + _o200k(
    _THREE_DIGITS, tail=_CONTRACTION + "?", line_end=r"[\r\n]*", condition=r"&&[^\p{Han}]"
)
_NOT_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGITS_FROM_THE_RIGHT = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))"
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_HALVING_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Word patterns in order of application, and what else a pre-tokenizer name implies."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole word that is in the vocabulary is taken without merging
    add_bos: bool = False  # when `tokenizer.ggml.add_bos_token` is absent


DEFAULT = PreTokenizer(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # Falcon's, for old files
)

_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGIT_GPT2 = PreTokenizer((_ONE_DIGIT, _GPT2))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_PLAIN_GPT4O = PreTokenizer((_GPT4O,))
_GLM4 = PreTokenizer((_LLAMA3,), ignore_merges=True)
_PLAIN_DEEPSEEK_V3 = PreTokenizer(_DEEPSEEK_V3)
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES,
    )
)
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA_BPE,
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4"),
        _PLAIN_GPT2,
    ),
    **dict.fromkeys(("trillion", "granite-docling"), _PLAIN_GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGIT_GPT2,
    ),
    "mellum2": _DIGIT_GPT2,
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"),
        _PLAIN_QWEN2,
    ),
    "grok-2": _PLAIN_QWEN2,
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "qwen35": PreTokenizer(
        (_cl100k(_ONE_DIGIT, letters=r"[\p{L}\p{M}]+", symbols=r"[^\s\p{L}\p{M}\p{N}]+"),)
    ),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_CONTRACTION + "|"),)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _cl100k(r"\p{N}+")), ignore_merges=True),
    "jais-2": PreTokenizer(
        (_LLAMA3.removesuffix(_SPACES) + _HALVING_SPACES + r"|\s{1,2}(?!\S)|\s{1}",)
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _PLAIN_GPT4O),
    "tekken": PreTokenizer((_o200k(_ONE_DIGIT, tail=""),), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _PLAIN_DEEPSEEK_V3),
    "afmoe": PreTokenizer((_DIGITS_FROM_THE_RIGHT, _ASIAN_SCRIPTS, _MARKED_WORDS)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_NOT_PUNCTUATION,))),
    "viking": PreTokenizer((_NOT_PUNCTUATION, _ONE_DIGIT)),
}
