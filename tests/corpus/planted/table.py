"""The published table: each bug, its description, and the number of styles it is planted in.

    python tests/corpus/planted/table.py        # prints it, for docs/checker.md

And the table of constructor arguments that the checker fills.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from manyheads.checker.bugs import FAMILY
from manyheads.checker.candidates import names
from tests.corpus.planted import matrix


def lines() -> list[str]:
    says = {name: one.description for name, one in FAMILY.items()}
    says |= {"dropout-left-on": "that applies dropout in evaluation too"}
    styles = {name: sum(name in table["bugs"] for table in matrix.TABLES.values()) for name in says}
    rows = [f"| `{name}` | {description} | {styles[name] or '–'} |" for name, description in says.items()]
    return ["| bug | attention … | styles |", "|---|---|---|", *rows]


def arguments() -> list[str]:
    rows = [
        f"| {what} | {value} | {', '.join(f'`{name}`' for name in every)} |"
        for what, (value, every) in names.CONSTRUCTOR.items()
    ]
    return ["| meaning | value | names |", "|---|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join([*arguments(), "", *lines()]))
