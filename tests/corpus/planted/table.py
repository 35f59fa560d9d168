"""The published table: each bug, its description, the number of styles it is planted in, and public reports.

    python tests/corpus/planted/table.py        # prints it, for docs/checker.md

And the tables of constructor arguments that the checker fills, and of roles.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from manyheads.checker.bugs import FAMILY, calls
from manyheads.checker.candidates import names
from manyheads.checker.candidates.roles import ROLES
from tests.corpus.planted import matrix

REPORTS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("reports.toml").read_text(encoding="utf-8")
)


def lines() -> list[str]:
    says = {name: one.description for name, one in FAMILY.items()}
    says |= {name: one.description for name, one in calls.BUGS.items()}
    styles = {name: sum(name in table["bugs"] for table in matrix.TABLES.values()) for name in says}
    links = {
        name: " ".join(f"[{n}]({url})" for n, url in enumerate(urls, 1)) for name, urls in REPORTS.items()
    }
    rows = [
        f"| `{name}` | {description} | {styles[name] or '–'} | {links.get(name, '')} |"
        for name, description in says.items()
    ]
    return ["| bug | attention … | styles | reports |", "|---|---|---|---|", *rows]


def arguments() -> list[str]:
    rows = [
        f"| {what} | {value} | {', '.join(f'`{name}`' for name in every)} |"
        for what, (value, every) in names.CONSTRUCTOR.items()
    ]
    return ["| meaning | value | names |", "|---|---|---|", *rows]


def roles() -> list[str]:
    rows = [f"| `{name}` | {description} |" for name, description in ROLES.items()]
    return ["| role | argument |", "|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join([*arguments(), "", *roles(), "", *lines()]))
