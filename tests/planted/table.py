"""The published table: each mistake, what is said of it, and the styles it is planted in.

    python tests/planted/table.py        # prints it, for docs/checker.md

And the table of constructor arguments that the checker fills.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted import matrix

from manyheads.checker.bugs import FAMILY
from manyheads.checker.candidates import names
from manyheads.checker.encodings import SINES, turns


def lines() -> list[str]:
    says = {name: one.is_ for name, one in FAMILY.items()}
    says |= {"dropout-left-on": "that drops weights in evaluation too"}
    says |= {name: is_ for name, (is_, _, _) in {**SINES, **turns("half")}.items()}
    says |= {"rotary-queries-only": "that turns queries and leaves keys"}
    says |= {"rotary-keys-only": "that turns keys and leaves queries"}
    styles = {name: [s for s, plants in matrix.PLANTS.items() if name in plants] for name in says}
    rows = [f"| `{name}` | {is_} | {len(styles[name]) or '–'} |" for name, is_ in says.items()]
    return ["| mistake | attention … | styles |", "|---|---|---|", *rows]


def arguments() -> list[str]:
    rows = [
        f"| {what} | {value} | {', '.join(f'`{name}`' for name in every)} |"
        for what, (value, every) in names.CONSTRUCTOR.items()
    ]
    return ["| meaning | value | names |", "|---|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join([*arguments(), "", *lines()]))
