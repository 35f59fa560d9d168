"""The published tables are those of the code."""

from pathlib import Path

from tests.corpus.planted import table

PAGE = (Path(__file__).parents[3] / "docs" / "checker.md").read_text(encoding="utf-8")


def test_the_page_has_every_bug_and_every_name() -> None:
    for line in [*table.arguments(), *table.lines()]:
        assert line in PAGE, (
            f"run python tests/corpus/planted/table.py, and put it into docs/checker.md: {line}"
        )
