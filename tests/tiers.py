"""Two tiers of tests: the marker `full` is on those that the everyday tier leaves out.

Tests over a table run on a part of it every day, chosen by a rule: every value occurs in it at least once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import pytest

full = pytest.mark.full


def everyday(cases: Iterable[Any]) -> list[Any]:
    """Return the cases (dataclasses) as parameters of a test, of which the everyday tier takes a part.

    It takes few in which every value of every field occurs, chosen greedily. Cases of another seed count as
    other values: in `tests.cases` these are the ones that PyTorch's fused kernels support.
    """
    cases = list(cases)
    settings = {case: {(case.seed, f.name, getattr(case, f.name)) for f in fields(case)} for case in cases}
    left = set().union(*settings.values())
    chosen = set()
    while left:
        best = max(cases, key=lambda case: len(settings[case] & left))  # the first among equals
        chosen.add(best)
        left -= settings[best]
    return [pytest.param(case, id=str(case), marks=() if case in chosen else full) for case in cases]


def crossed(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every combination of values, of which the everyday tier takes a part.

    It takes the n-th value of one with the n-th of the others, and begins anew where a list ends.
    """
    lists = list(values.values())
    chosen = {tuple(n % len(each) for each in lists) for n in range(max(map(len, lists)))}
    rows = []
    for places in itertools.product(*(range(len(each)) for each in lists)):
        row = [each[place] for each, place in zip(lists, places, strict=True)]
        rows.append(pytest.param(*row, marks=() if places in chosen else full))
    return pytest.mark.parametrize(tuple(values), rows)
