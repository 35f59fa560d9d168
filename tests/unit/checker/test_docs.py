"""The published tables are those of the code."""

from pathlib import Path

from tests.corpus.planted import table

PAGE = (Path(__file__).parents[3] / "docs" / "checker.md").read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_code() -> None:
    """Whole, so that a row of a bug that was renamed or removed doesn't stay."""
    for rows in (table.arguments(), table.lines()):
        assert "\n" + "\n".join(rows) + "\n\n" in PAGE + "\n", (
            "Run python tests/corpus/planted/table.py, and replace the tables in docs/checker.md."
        )
