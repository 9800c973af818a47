"""What people type, and what the files of repositories are called."""

from __future__ import annotations

import pytest

from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.modelnames import (
    Reference,
    could_be_name,
    group_files,
    matching,
    parse_reference,
    quantisation_of,
    usual,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", Reference("owner/name")),
        ("owner/name:Q4_K_M", Reference("owner/name", label="Q4_K_M")),
        ("hf.co/owner/name:q8_0", Reference("owner/name", label="q8_0")),
        ("HF.co/Owner/Name-1.5_B", Reference("Owner/Name-1.5_B")),
        ("https://huggingface.co/owner/name", Reference("owner/name")),
        ("https://huggingface.co/owner/name/", Reference("owner/name")),
        ("owner/name/a.gguf", Reference("owner/name", file="a.gguf")),
        ("owner/name/Q4_K_M/a.gguf", Reference("owner/name", file="Q4_K_M/a.gguf")),
        (
            "https://huggingface.co/owner/name/resolve/main/a%20b.gguf?download=true",
            Reference("owner/name", file="a b.gguf"),
        ),
        (
            "https://huggingface.co/owner/name/blob/v1/d/a.gguf#top",
            Reference("owner/name", revision="v1", file="d/a.gguf"),
        ),
    ],
)
def test_names_and_addresses(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert could_be_name(text)


@pytest.mark.parametrize(
    "text",
    ["", "/", "name", "/owner/name", "../owner/name", "owner//name", "https://hf.co/name", "a/b c"],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ArgumentError, match="owner/name"):
        parse_reference(text)


@pytest.mark.parametrize("text", ["/a/b.gguf", "./owner/name", "../a", "a b.gguf", "model.gguf"])
def test_what_can_only_be_a_path(text: str) -> None:
    assert not could_be_name(text)


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("Mixtral-8x7B-Instruct-v0.1-Q4_K_M", "Q4_K_M"),
        ("qwen3-30b-a3b-q4_k_m", "Q4_K_M"),
        ("mixtral-8x7b-v0.1.Q5_0", "Q5_0"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("DeepSeek-R1-UD-IQ1_S", "UD-IQ1_S"),
        ("model.i1-IQ3_XXS", "i1-IQ3_XXS"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("GLM-4.5-Air-MXFP4_MOE", "MXFP4_MOE"),
        ("DeepSeek-V3-TQ1_0", "TQ1_0"),
        ("model_IQ4_NL", "IQ4_NL"),
        ("OLMoE-1B-7B-F16", "F16"),
        ("OLMoE-1B-7B.bf16", "BF16"),
        ("Q2_K/model", "Q2_K"),
        ("Q2_K/model-Q3_K_S", "Q3_K_S"),
        ("ggml-model", None),
        ("Qwen3-30B-A3B", None),
    ],
)
def test_quantisation_in_names(stem: str, expected: str | None) -> None:
    assert quantisation_of(stem) == expected


FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-model-F16.gguf",
    "model-Q2_K.gguf",
    "model-Q4_K_M.gguf",
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/model-Q8_0-00002-of-00002.gguf",
    "BF16/model-BF16-00002-of-00003.gguf",
]


def test_files_become_models() -> None:
    models = {model.label: model for model in group_files(FILES)}
    assert sorted(models) == ["BF16", "Q2_K", "Q4_K_M", "Q8_0"]
    assert models["Q8_0"].paths == (
        "Q8_0/model-Q8_0-00001-of-00002.gguf",
        "Q8_0/model-Q8_0-00002-of-00002.gguf",
    )
    assert (models["Q8_0"].shards, models["Q8_0"].complete) == (2, True)
    assert (models["BF16"].shards, models["BF16"].complete) == (3, False)


def test_two_models_of_one_quantisation_are_named_by_their_files() -> None:
    models = group_files(["small-Q8_0.gguf", "large-Q8_0.gguf", "small-F16.gguf"])
    assert [model.label for model in models] == ["large-Q8_0", "F16", "small-Q8_0"]
    reference = parse_reference("a/b:q8_0")
    assert [m.label for m in matching(models, reference)] == ["large-Q8_0", "small-Q8_0"]
    assert [m.label for m in matching(models, parse_reference("a/b:LARGE-q8_0"))] == ["large-Q8_0"]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("a/b:q4_k_m", ["Q4_K_M"]),
        ("a/b:model-q2_k", ["Q2_K"]),
        ("a/b:model-Q2_K.gguf", ["Q2_K"]),
        ("a/b/Q8_0/model-Q8_0-00002-of-00002.gguf", ["Q8_0"]),
        ("a/b:Q4_K", []),
        ("a/b:Q6_K", []),
        ("a/b/model.gguf", []),
    ],
)
def test_one_model_of_many(name: str, labels: list[str]) -> None:
    assert [model.label for model in matching(group_files(FILES), parse_reference(name))] == labels


def test_a_prefix_of_makers_may_be_left_out() -> None:
    models = group_files(["m-UD-Q4_K_XL.gguf", "m-UD-Q2_K_XL.gguf", "m-Q2_K_XL.gguf"])
    found = {
        name: [model.label for model in matching(models, parse_reference(f"a/b:{name}"))]
        for name in ("Q4_K_XL", "Q2_K_XL", "UD-Q2_K_XL")
    }
    assert found == {
        "Q4_K_XL": ["UD-Q4_K_XL"],
        "Q2_K_XL": ["Q2_K_XL"],
        "UD-Q2_K_XL": ["UD-Q2_K_XL"],
    }


@pytest.mark.parametrize(
    ("quantisations", "chosen"),
    [
        (["Q8_0", "Q4_K_M", "Q2_K"], ["Q4_K_M"]),
        (["Q8_0", "Q4_K_S", "Q6_K"], ["Q4_K_S"]),
        (["MXFP4", "F16"], ["MXFP4"]),
        (["F16"], ["F16"]),
        (["Q2_K", "BF16"], ["BF16", "Q2_K"]),
    ],
)
def test_what_is_taken_when_nobody_says(quantisations: list[str], chosen: list[str]) -> None:
    models = group_files([f"model-{name}.gguf" for name in quantisations])
    assert [model.label for model in usual(models)] == chosen
