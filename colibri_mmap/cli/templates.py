"""The chat template that a command's options ask for."""

from __future__ import annotations

from pathlib import Path

from colibri_mmap.errors import ArgumentError


def template_source(template: str | None, file: Path | None) -> str | None:
    """The Jinja of --chat-template, which may be a name, or of --chat-template-file."""
    if template is not None and file is not None:
        raise ArgumentError("--chat-template and --chat-template-file exclude each other")
    if file is not None:
        return decoded(file.read_bytes(), str(file))
    if template is None or "{" in template:
        return template
    from colibri_mmap.runtime.template import CHATML, INST, PLAIN

    named = {"chatml": CHATML, "inst": INST, "plain": PLAIN}
    if template not in named:
        raise ArgumentError(
            f"--chat-template {template}: choose from {', '.join(named)}, or give Jinja"
        )
    return named[template]


def decoded(content: bytes, source: str) -> str:
    """The text of a file or stream called `source`, which has to be UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(f"{source} is not UTF-8 text") from None
