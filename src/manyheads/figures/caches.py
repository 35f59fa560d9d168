"""A figure of what policies of a cache drop, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from manyheads.figures.cells import DPI
from manyheads.figures.fonts import legible
from manyheads.figures.heatmaps import WEIGHT, Picture, add_colorbar, draw_matrix, set_families, set_title
from manyheads.policies import Cost, ModelCost
from manyheads.shapes import kind

MARKERS = "osD^vPX*"  # policies differ by colour and by marker
CELLS = 512  # the most columns of a strip


def cache_costs(
    costs: Mapping[str, Mapping[int, Cost | ModelCost]],
    *,
    budget: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw which keys some policies keep, and what they cost by budget.

    Above, a strip for each policy: the share of the heads (of all layers and sequences) that keep the key at
    each position of the prompt. Below, the means over heads and queries: the weight on dropped keys, and the
    change of the output, which for a model is the increase of the loss.

    Args:
        costs: For each policy by name, its costs by budget, from `policies.measure` for all or from
            `policies.measure_model` for all.
        budget: The budget whose kept keys are drawn. Default: the middle one of the first policy.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        TypeError: If a cost isn't one, or costs of layers and of models are mixed.
        ValueError: If there are no costs, or none for the budget.
    """
    policies = _check_costs(costs)
    budgets = sorted(next(iter(policies.values())))
    budget = budgets[(len(budgets) - 1) // 2] if budget is None else budget
    shares = {name: _kept_shares(by_budget[budget].kept) for name, by_budget in policies.items()
              if budget in by_budget}  # fmt: skip
    if not shares:
        raise ValueError(f"Expected budget to be one of {', '.join(map(str, budgets))}, got {budget}.")
    figure = Picture(figsize=(8.6, 3.6 + 0.42 * len(shares) + 0.5), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[0.42 * len(shares) + 0.3, 3.0])
    _draw_kept(figure, figure.add_subplot(grid[0, :]), shares, budget)
    is_model = isinstance(next(iter(next(iter(policies.values())).values())), ModelCost)
    change = "increase of the loss (nats per token)" if is_model else "change of the output, relative"
    colors = colormaps[WEIGHT](np.linspace(0.0, 0.85, max(len(policies), 2)))
    for column, label in enumerate(("weight on dropped keys", change)):
        axes = figure.add_subplot(grid[1, column])
        lowest = 0.0
        for n, (name, by_budget) in enumerate(policies.items()):
            x = sorted(by_budget)
            y = [_means(by_budget[size])[column] for size in x]
            lowest = min(lowest, *y)
            marker = MARKERS[n % len(MARKERS)]
            axes.plot(x, y, color=colors[n], marker=marker, markersize=5, linewidth=1.5, label=legible(name))
        every = sorted({size for by_budget in policies.values() for size in by_budget})
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(every, [f"{size:,}" for size in every])
        axes.set_xlabel("budget: keys that each head keeps of the prompt", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(color="#e0e0e0", linewidth=0.6)
        if lowest >= 0:
            axes.set_ylim(0, None)
        if column == 0:
            legend = axes.legend(fontsize=8, frameon=False)
            for text in legend.get_texts():
                text.set_parse_math(False)
            set_families(legend.get_texts())
    set_title(figure, title, 11)
    return figure


def _check_costs(costs: Any) -> Mapping[str, Mapping[int, Any]]:
    """Return costs, checked to be of one kind."""
    if not isinstance(costs, Mapping) or not all(isinstance(each, Mapping) for each in costs.values()):
        raise TypeError(
            f"Expected costs by policy and budget, {{name: {{budget: cost}}}}, got {kind(costs)}."
        )
    flat = [cost for by_budget in costs.values() for cost in by_budget.values()]
    if not flat or not all(costs.values()):
        raise ValueError("Expected a cost of each policy, got none. Compute it with policies.measure.")
    kinds = {type(cost) for cost in flat}
    if kinds not in ({Cost}, {ModelCost}):
        got = ", ".join(sorted(kind(cost) for cost in flat)[:3])
        raise TypeError(f"Expected costs from policies.measure, or all from measure_model, got {got}.")
    return costs


def _means(cost: Cost | ModelCost) -> tuple[float, float]:
    """Return the mean weight on dropped keys, and the mean change of the output."""
    change = cost.loss if isinstance(cost, ModelCost) else cost.error
    return float(cost.dropped.double().mean()), float(change.double().mean())


def _kept_shares(kept: Tensor) -> np.ndarray:
    """Return the share of the heads that keep each position, of kept positions `[..., n]`."""
    heads = kept.flatten(0, -2)  # [heads, n]
    counts = heads.flatten().bincount(minlength=1)
    return (counts.double() / max(len(heads), 1)).cpu().numpy()


def _draw_kept(figure: Figure, axes: Axes, shares: Mapping[str, np.ndarray], budget: int) -> None:
    length = max(map(len, shares.values()))
    cells = min(length, CELLS)
    edges = np.arange(cells + 1) * length // cells
    rows = np.zeros((len(shares), length))
    for row, share in zip(rows, shares.values(), strict=True):
        row[: len(share)] = share
    pooled = np.add.reduceat(rows, edges[:-1], axis=1) / np.diff(edges)
    drawn = draw_matrix(axes, pooled, Normalize(0, 1), WEIGHT, (-0.5, length - 0.5, len(shares) - 0.5, -0.5))
    axes.set_aspect("auto")
    axes.set_yticks(range(len(shares)), [legible(name) for name in shares], parse_math=False)
    set_families(axes.get_yticklabels())
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"position in the prompt, with a budget of {budget:,}", fontsize=9)
    add_colorbar(drawn, "heads that keep it", ax=axes, pad=0.02)
