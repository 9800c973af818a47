"""The JSON schema that a command's options ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_mmap.cli.templates import decoded
from colibri_mmap.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_mmap.runtime.grammar import Grammar


def json_grammar(schema: str | None, file: Path | None) -> Grammar | None:
    """The grammar of --json-schema or --json-schema-file."""
    if schema is not None and file is not None:
        raise ArgumentError("--json-schema and --json-schema-file exclude each other")
    option = "--json-schema"
    if file is not None:
        option, schema = str(file), decoded(file.read_bytes(), str(file))
    if schema is None:
        return None
    from colibri_mmap.runtime.grammar import Grammar

    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{option} is not JSON: {error}") from None
    return Grammar.json_schema(document)
