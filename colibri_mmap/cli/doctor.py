"""`doctor`: what of this machine decides how fast a model runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from colibri_mmap.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.runtime.checkup import Finding


def doctor(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Look at processor, memory and disk, and say what to do about what is slow.

    Nothing is changed. With a model its place is looked at too, and the disk is measured for three
    seconds by reading parts of it.
    """
    given = options.given_model(model, model_option)

    from colibri_mmap.cli.console import results, silent_keyboard
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.checkup import checkup

    with silent_keyboard():
        findings = list(checkup(open_gguf(given.path) if given else None))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        results().print(_table(findings))


def _table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from colibri_mmap.cli.console import printable

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        warns = finding.state == "warn"
        state = Text(finding.state, "yellow" if warns else "green")
        text = Text(printable(finding.text))
        if warns:
            text.append(printable(f"\n{finding.advice}"), "yellow")
        table.add_row(state, Text(finding.name, "dim"), text)
    return table
