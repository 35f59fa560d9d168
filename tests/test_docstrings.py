"""Every public name says what it does: with shapes, units, errors and where it comes from.

Public is what `__all__` names, what the measures, the models and the classic faces define without an
underscore, and the methods and properties of those classes, with what brackets and parentheses behind an
object call. An override without a docstring says what its base says.
Errors are not only named: every one is provoked here, and must come out of our own code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_tb
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads import checker, classic, figures, files, lm, measures, models, reductions
from manyheads.classic import annotated, components, modeling_attention, torch_multihead
from manyheads.observe import NoSuchLayer, Reduced, Seen, attend
from manyheads.scores import Problem
from manyheads.shapes import Shape

HOME = Path(mh.__file__).parent
FACES = [
    f"manyheads.classic.{one.name}" for one in pkgutil.iter_modules(classic.__path__) if one.name != "common"
]
LISTED = ["manyheads", "manyheads.figures", "manyheads.checker", "manyheads.lm", "manyheads.observe"]
UNLISTED = ["manyheads.measures", "manyheads.models", *FACES]  # which have no `__all__`
SPECIAL = ("__call__", "__getitem__")

SHAPE = re.compile(r"`\[[^\]`]+\]`")
ERROR = re.compile(r"\b([A-Z]\w*Error|Refused|Unclear|NoSuchLayer)\b")
AS = re.compile(r"[Aa]rguments as `(\w+)`")  # a docstring that leaves them to another's
CITES = re.compile(r"[A-Z][\w-]+(\s+et\s+al\.|\s+Team|\s+&\s+[A-Z]\w+)?\s+(19|20)\d\d\b|`torch\.[\w.]+`")


class Name(NamedTuple):
    """A public name: a class, a function, a method or a property."""

    path: str  # by where it is defined, without manyheads
    what: Any
    doc: str
    own: bool  # is the docstring its own?

    def inside(self) -> bool:
        """Is it a method or a property?"""
        return isinstance(self.what, property) or self.what.__qualname__ != self.what.__name__

    def fails(self) -> bool:
        """Is it an exception itself?"""
        return inspect.isclass(self.what) and issubclass(self.what, BaseException)

    def signature(self) -> str:
        """The parameters and what comes back, as written."""
        if self.fails():
            return ""
        if isinstance(self.what, property):
            return str(inspect.signature(self.what.fget))  # type: ignore[arg-type]
        return str(inspect.signature(self.what))

    def parameters(self) -> list[str]:
        """What can be given, and so can be wrong."""
        if isinstance(self.what, property) or self.fails():
            return []
        if inspect.isclass(self.what) and not inits(self.what) and not is_dataclass(self.what):
            return []
        return [name for name in inspect.signature(self.what).parameters if name not in ("self", "cls")]

    def errors(self) -> set[str]:
        """The exceptions that its docstring names; one that is an exception itself raises nothing."""
        return set() if self.fails() else {found.group(1) for found in ERROR.finditer(self.doc)}


def inits(cls: type) -> list[FunctionType]:
    """What runs when one is made, as far as it is ours."""
    found = []
    for name in ("__init__", "__post_init__"):
        owner = next(c for c in (*cls.__mro__, None) if c is None or name in vars(c))
        if owner is not None and owner.__module__.startswith("manyheads"):
            function = vars(owner)[name]
            if function.__code__.co_filename != "<string>":  # written, not made by dataclass
                found.append(function)
    return found


def public(module: ModuleType) -> Iterator[Any]:
    """The classes and functions that a module offers."""
    names = getattr(module, "__all__", None)
    for name in dir(module):
        value = getattr(module, name)
        here = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if (name in names if names is not None else here) and callable(value):
            yield value


def path_of(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}".removeprefix("manyheads.")


@cache
def surface() -> tuple[Name, ...]:
    """All public names, once each."""
    found: dict[str, Name] = {}
    for module in map(import_module, [*LISTED, *UNLISTED]):
        for what in public(module):
            own = what.__doc__ or ""
            if inspect.isclass(what) and own.startswith(f"{what.__name__}("):  # made by dataclass
                own = ""
            found[path_of(what)] = Name(path_of(what), what, own, True)
            for owner in what.__mro__ if inspect.isclass(what) else ():
                if not owner.__module__.startswith("manyheads"):
                    continue
                for name, value in vars(owner).items():
                    method = value.fget if isinstance(value, property) else value
                    method = getattr(method, "__func__", method)
                    hidden = name.startswith("_") and name not in SPECIAL
                    if hidden or not isinstance(method, FunctionType):
                        continue
                    shown = value if isinstance(value, property) else method
                    doc = inspect.getdoc(value) or inspect.getdoc(getattr(owner, name)) or ""
                    path = f"{path_of(owner)}.{name}"
                    found[path] = Name(path, shown, doc, bool(method.__doc__))
    return tuple(found.values())


def by_path() -> dict[str, Name]:
    return {name.path: name for name in surface()}


def described(name: Name) -> str:
    """Where its parameters may be named: its docstring, its class's, and what it leaves them to."""
    home = name.path.rpartition(".")[0]
    about = [name.doc]
    if name.inside():
        about.append(by_path()[home].doc if home in by_path() else "")
    about += [by_path()[f"{home}.{other}"].doc for other in AS.findall(name.doc)]
    return "\n".join(about)


def fields(name: Name) -> dict[str, str]:
    """The parameters that a caller writes, and of what kind each is."""
    if not name.parameters():
        return {}
    found = inspect.signature(name.what).parameters
    return {one: str(found[one].annotation) for one in name.parameters() if not one.startswith("_")}


# -- docstrings and shapes -------------------------------------------------------------------------


def test_the_surface_is_there() -> None:
    """A collection that finds nothing would pass everything."""
    assert len(surface()) > 200
    for path in ("functional.attention", "maps.AttentionMap.entropy", "measures.induction", "lm.train.train"):
        assert path in by_path()
    assert "classic.common.check" not in by_path()


def test_every_name_has_a_docstring() -> None:
    assert [name.path for name in surface() if not name.doc.strip()] == []


def test_every_module_has_a_docstring() -> None:
    homes = {inspect.getmodule(inspect.unwrap(n.what)) for n in surface() if not isinstance(n.what, property)}
    assert [home.__name__ for home in homes if home is not None and not (home.__doc__ or "").strip()] == []


def test_every_tensor_has_its_shape() -> None:
    lacking = [
        name.path
        for name in surface()
        if re.search(r"\b(Tensor|Weights)\b", name.signature()) and not SHAPE.search(name.doc)
    ]
    assert lacking == []


def test_every_parameter_is_named() -> None:
    lacking = [
        f"{name.path}: {one}"
        for name in surface()
        if name.own
        for one in fields(name)
        if not re.search(rf"\b{one}\b", described(name))
    ]
    assert lacking == []


def shaped(parameter: str, doc: str) -> bool:
    """Is it followed by a shape, in the same clause and at most one line further?"""
    return re.search(rf"\b{parameter}\b(?!')[^.;\n]*\n?[^.;\n]*`\[", doc) is not None


def test_every_tensor_that_is_given_has_its_shape() -> None:
    lacking = [
        f"{name.path}: {one}"
        for name in surface()
        if name.own
        for one, kind in fields(name).items()
        if re.search(r"\bTensor\b", kind) and not shaped(one, described(name))
    ]
    assert lacking == []


@pytest.mark.parametrize("parameter", ["q", "k", "v", "sink", "offset"])
def test_a_shape_that_is_taken_away_is_missed(parameter: str) -> None:
    doc = by_path()["functional.attention"].doc
    assert shaped(parameter, doc)
    assert not shaped(parameter, re.sub(rf"(\b{parameter}: [^`]*)`\[[^`]*`", r"\1", doc, count=1))


# -- units -----------------------------------------------------------------------------------------

SHARE = "between 0 and 1"
UNITS = {
    "maps.AttentionMap.entropy": "nats",
    "maps.AttentionMap.distance": "positions",
    "maps.AttentionMap.row_max": SHARE,
    "maps.AttentionMap.received": "weights",
    "maps.AttentionMap.top": SHARE,
    "maps.AttentionMap.mass": SHARE,
    "maps.AttentionMap.masses": SHARE,
    "maps.AttentionMap.pooled": SHARE,
    "maps.AttentionMap.value_norms": "in the unit of v W_o",
    "maps.AttentionMap.logits_max": "natural log",
    "maps.AttentionMap.sink_weight": SHARE,
    "maps.AttentionMap.divergence": "nats",
    "maps.AttentionMap.lse": "natural log",
    "measures.previous_token": SHARE,
    "measures.current_token": SHARE,
    "measures.first_token": SHARE,
    "measures.duplicate_token": SHARE,
    "measures.induction": SHARE,
    "measures.local": SHARE,
    "measures.rollout": SHARE,
    "observe.reduced.Reduced.columns": "nats",
    "observe.seen.Seen.table": "nats",
    "figures.head": "weight",
    "figures.beside": "weight",
    "figures.grid": "weight",
    "figures.received": "weight",
    "figures.entropy": "nats",
    "figures.measures": "nats",
    "biases.ALiBi": "per position",
    "biases.Bias.add": "natural log",
    "positions.Rotary": "radians",
    "masks.Window": "keys",
    "cache.Cache": "tokens",
    "lm.generate.generate": "tokens",
    "lm.generate.complete": "tokens",
    "lm.train.Options": "tokens",
    "lm.model.Config": "tokens",
}
UNITS_OF_PARAMETERS = {"timeout": "seconds", "memory": "bytes", "max_bytes": "bytes"}


def test_every_measure_says_its_unit() -> None:
    names = by_path()
    assert [f"{path}: {unit}" for path, unit in UNITS.items() if unit not in names[path].doc] == []


def test_no_measure_is_without_a_unit() -> None:
    statistics = {f"maps.AttentionMap.{name}" for name in reductions.BY_NAME}
    assert statistics | {path_of(one) for one in public(measures)} <= UNITS.keys()


def test_every_limit_says_its_unit() -> None:
    lacking = [
        f"{name.path}: {parameter} in {unit}"
        for name in surface()
        for parameter, unit in UNITS_OF_PARAMETERS.items()
        if parameter in name.parameters() and unit not in name.doc
    ]
    lacking += [name.path for name in surface() if name.path.endswith(".nbytes") and "bytes" not in name.doc]
    assert lacking == []


# -- errors ----------------------------------------------------------------------------------------

Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)
X = torch.ones(2, 5, 12)
MANY = mh.MultiHeadAttention(12, 4)
ONE, CROSS = mh.SelfAttention(12), mh.CrossAttention(12, 6)
SIZES = Shape(2, 4, 2, 5, 5, 8, 8)
TINY = lm.LanguageModel(lm.Config(vocab=16, embed=16, heads=2, layers=1, hidden=8, context=8))
FIRST = modeling_attention.SelfAttention(12, 12)
FIRST_HEADS = modeling_attention.MultiHeadSelfAttention(12, 12, 4)
SECOND = torch_multihead.MultiheadAttention(12, 4)
THIRD, THIRD_CROSS = components.SelfAttention(12, 4, 4), components.CrossAttention(12, 6, 4, 4)
THIRD_HEADS = components.MultiHeadedAttention([THIRD], 12)
FOURTH = annotated.MultiHeadAttention(4, 12)
PREPARE = annotated.PrepareForMultiHeadAttention(12, 4, 3, True)
ABSENT = "no folder/of this name"
BAD: Any = "no such thing"  # what nothing takes
BEHIND_A_FILE = Path(__file__) / "report"
REPORT = checker.Report("mine", "self", False, [], pair=(X[0], X[0], "output"))
MASK: Any = torch.ones(5, 5) > 0  # a mask that says no polarity


@cache
def amap() -> mh.AttentionMap:
    return mh.attention_with_map(Q, K, K)[1]


@cache
def seen() -> Seen:
    with torch.no_grad(), mh.observe(MANY) as found:
        MANY(X)
    return found


def ruled() -> mh.AttentionMap:
    """A map that no file can hold."""
    return amap().under(mh.Rule(lambda b, h, i, j: j <= i))


def stale() -> Tensor:
    q = Q.clone()
    found = mh.attention_with_map(q, K, K)[1]
    q.zero_()
    return found.entropy()


def observing(run: Any = X, **options: Any) -> Any:
    with torch.no_grad(), mh.observe(options.pop("model", MANY), **options) as found:
        MANY(run)
    return found


def attending(q: Tensor, k: Tensor, **options: Any) -> None:
    """A module that tells what it computes."""

    class Telling(nn.Module):
        def forward(self) -> Tensor:
            return attend(Problem.of(q, k, k), lambda: q)

    model = Telling()
    with mh.observe(model, **options):
        model()


def values_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention."""
    return v


def ruled_run() -> Seen:
    found = Seen()
    found.add("layer", ruled(), K)
    return found


def in_a_folder(call: Callable[[Path], Any]) -> None:
    with TemporaryDirectory() as folder:
        call(Path(folder))


def no_model(folder: Path) -> Any:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return lm.load(folder)


def of_theirs(folder: Path) -> Any:
    (folder / "config.json").write_text('{"model_type": "no such type"}')
    return models.load(folder)


def without_transformers() -> Any:
    with patch.dict(sys.modules, transformers=None):
        in_a_folder(of_theirs)


def without_pandas() -> Any:
    with patch.dict(sys.modules, pandas=None):
        return seen().table().to_pandas()


WRONG: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    # masks
    ("masks.Window", TypeError, lambda: mh.Window(left=BAD)),
    ("masks.Window", ValueError, lambda: mh.Window(left=-1)),
    ("masks.Diagonal", TypeError, lambda: mh.Diagonal(BAD)),
    ("masks.Prefix", TypeError, lambda: mh.Prefix(BAD)),
    ("masks.Prefix", ValueError, lambda: mh.Prefix(-1)),
    ("masks.Lengths", TypeError, lambda: mh.Lengths(BAD)),
    ("masks.Lengths", TypeError, lambda: mh.Lengths(3, left=BAD)),
    ("masks.Lengths", ValueError, lambda: mh.Lengths(-1)),
    ("masks.Keys", TypeError, lambda: mh.Keys(BAD)),
    ("masks.Keys", ValueError, lambda: mh.Keys([-1])),
    ("masks.Documents", TypeError, lambda: mh.Documents(BAD)),
    ("masks.SameToken", TypeError, lambda: mh.SameToken(BAD)),
    ("masks.AfterSameToken", TypeError, lambda: mh.AfterSameToken(BAD)),
    ("masks.Keep", TypeError, lambda: mh.Keep(BAD)),
    ("masks.Keep", ValueError, lambda: mh.Keep(MASK[0])),
    ("masks.Drop", TypeError, lambda: mh.Drop(BAD)),
    ("masks.Drop", ValueError, lambda: mh.Drop(MASK[0])),
    ("masks.Rule", TypeError, lambda: mh.Rule(BAD)),
    ("masks.Rule.keep", TypeError, lambda: mh.Rule(lambda b, h, i, j: 3).keep(0, 0, 0, 0)),
    ("masks.Mask.check", ValueError, lambda: mh.Keep(MASK[:2]).check(SIZES)),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(BAD)),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(4, 4, cast(Any, 1.5))),
    ("masks.Mask.table", ValueError, lambda: mh.Causal().table(-1)),
    ("masks.Mask.draw", TypeError, lambda: mh.Causal().draw(offset=BAD)),
    ("masks.Mask.draw", ValueError, lambda: mh.Causal().draw(-1)),
    ("values.Value.to", RuntimeError, lambda: mh.Keep(MASK).to(BAD)),
    # biases and positions
    ("biases.ALiBi", TypeError, lambda: mh.ALiBi(BAD)),
    ("biases.ALiBi", ValueError, lambda: mh.ALiBi(0)),
    ("biases.Relative", TypeError, lambda: mh.Relative(BAD)),
    ("biases.Relative", ValueError, lambda: mh.Relative(torch.zeros(4, 2))),
    ("biases.Relative.learned", TypeError, lambda: mh.Relative.learned(BAD, 2)),
    ("biases.Relative.learned", ValueError, lambda: mh.Relative.learned(4, -1)),
    ("biases.Dense", TypeError, lambda: mh.Dense(BAD)),
    ("biases.Dense", ValueError, lambda: mh.Dense(torch.tensor([torch.nan]))),
    ("biases.Bias.check", ValueError, lambda: mh.ALiBi(3).check(SIZES)),
    ("positions.Sinusoidal", TypeError, lambda: mh.Sinusoidal(BAD)),
    ("positions.Sinusoidal", ValueError, lambda: mh.Sinusoidal(3)),
    ("positions.Sinusoidal.encode", TypeError, lambda: mh.Sinusoidal(4).encode(BAD)),
    ("positions.Sinusoidal.__call__", ValueError, lambda: mh.Sinusoidal(4)(X)),
    ("positions.Rotary.__call__", ValueError, lambda: mh.Rotary(4)(Q[..., :2], IDS)),
    ("positions.Rotary", TypeError, lambda: mh.Rotary(BAD)),
    ("positions.Rotary", ValueError, lambda: mh.Rotary(3)),
    ("positions.Rotary.stretched", ValueError, lambda: mh.Rotary(4).stretched(0.5)),
    # functions, layers, the cache
    ("functional.attention", TypeError, lambda: mh.attention(Q, K, BAD)),
    ("functional.attention", ValueError, lambda: mh.attention(Q, K, K[:1])),
    ("functional.attention_with_map", TypeError, lambda: mh.attention_with_map(Q, K, BAD)),
    ("functional.attention_with_map", ValueError, lambda: mh.attention_with_map(Q, K, K[:1])),
    ("functional.explain", TypeError, lambda: mh.explain(Q, K, BAD)),
    ("functional.explain", ValueError, lambda: mh.explain(Q, K, K, kernel=BAD)),
    ("layers.SelfAttention", TypeError, lambda: mh.SelfAttention(BAD)),
    ("layers.SelfAttention", ValueError, lambda: mh.SelfAttention(0)),
    ("layers.SelfAttention.forward", TypeError, lambda: ONE(BAD)),
    ("layers.SelfAttention.forward", ValueError, lambda: ONE(X[0])),
    ("layers.SelfAttention.attend", TypeError, lambda: ONE.attend(X, mask=MASK)),
    ("layers.SelfAttention.attend", ValueError, lambda: ONE.attend(X[0])),
    ("layers.CrossAttention", TypeError, lambda: mh.CrossAttention(12, BAD)),
    ("layers.CrossAttention", ValueError, lambda: mh.CrossAttention(12, 0)),
    ("layers.CrossAttention.forward", TypeError, lambda: CROSS(X, BAD)),
    ("layers.CrossAttention.forward", ValueError, lambda: CROSS(X, X)),
    ("layers.CrossAttention.attend", TypeError, lambda: CROSS.attend(X, BAD)),
    ("layers.CrossAttention.attend", ValueError, lambda: CROSS.attend(X, X)),
    ("layers.MultiHeadAttention", TypeError, lambda: mh.MultiHeadAttention(12, BAD)),
    ("layers.MultiHeadAttention", ValueError, lambda: mh.MultiHeadAttention(12, 5)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, mask=MASK)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, cache=BAD)),
    ("layers.MultiHeadAttention.forward", ValueError, lambda: MANY(X[0])),
    ("layers.MultiHeadAttention.attend", TypeError, lambda: MANY.attend(BAD)),
    ("layers.MultiHeadAttention.attend", ValueError, lambda: MANY.attend(X, X, cache=mh.Cache())),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load({"q.weight": BAD})),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load(BAD)),
    ("layers.MultiHeadAttention.load", ValueError, lambda: MANY.load({})),
    ("layers.MultiHeadAttention.export", ValueError, lambda: MANY.export(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(mask=BAD)),
    ("cache.Cache", ValueError, lambda: mh.Cache(0)),
    ("cache.Cache.vote", TypeError, lambda: mh.Cache(votes=2).vote(BAD)),
    ("cache.Cache.vote", ValueError, lambda: mh.Cache(votes=2).vote(amap())),
    ("cache.Cache.received", TypeError, lambda: mh.Cache(votes=2).received("x")),
    ("cache.Cache.received", ValueError, lambda: mh.Cache(votes=2).received()),
    ("cache.Cache.append", TypeError, lambda: mh.Cache().append(BAD, K)),
    ("cache.Cache.append", ValueError, lambda: mh.Cache(3).append(K, K)),
    ("cache.Cache.write", TypeError, lambda: mh.Cache().write(K, BAD)),
    ("cache.Cache.write", ValueError, lambda: mh.Cache(3).write(K, K)),
    # maps
    ("maps.AttentionMap", RuntimeError, stale),
    ("maps.AttentionMap.of", TypeError, lambda: mh.AttentionMap.of(BAD)),
    ("maps.AttentionMap.of", ValueError, lambda: mh.AttentionMap.of(Problem.of(Q, K, K), Q)),
    ("maps.AttentionMap.under", TypeError, lambda: amap().under(BAD)),
    ("maps.AttentionMap.under", ValueError, lambda: amap().under(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.only", IndexError, lambda: amap().only(heads=9)),
    ("maps.AttentionMap.to", ValueError, lambda: amap().to(BAD)),
    ("maps.AttentionMap.to", TypeError, lambda: amap().to(torch.int64)),
    ("maps.AttentionMap.labelled", TypeError, lambda: amap().labelled(BAD)),
    ("maps.AttentionMap.labelled", ValueError, lambda: amap().labelled(["a"])),
    ("maps.AttentionMap.again", ValueError, lambda: amap().again(Problem.of(Q, K, K), Q)),
    ("maps.AttentionMap.again", TypeError, lambda: amap().again(Problem.of(Q, K, K), BAD)),
    ("maps.AttentionMap.dense", TypeError, lambda: amap().dense(BAD)),
    ("maps.AttentionMap.dense", ValueError, lambda: amap().dense(10)),
    ("maps.AttentionMap.__getitem__", IndexError, lambda: amap()[0, 9]),
    ("maps.AttentionMap.received", TypeError, lambda: amap().received(BAD)),
    ("maps.AttentionMap.received", ValueError, lambda: amap().received(normalize=BAD)),
    ("maps.AttentionMap.top", TypeError, lambda: amap().top(BAD)),
    ("maps.AttentionMap.top", ValueError, lambda: amap().top(0)),
    ("maps.AttentionMap.mass", TypeError, lambda: amap().mass(BAD)),
    ("maps.AttentionMap.mass", ValueError, lambda: amap().mass(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.masses", TypeError, lambda: amap().masses(BAD)),
    ("maps.AttentionMap.masses", ValueError, lambda: amap().masses(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.pooled", TypeError, lambda: amap().pooled(BAD, 2)),
    ("maps.AttentionMap.pooled", ValueError, lambda: amap().pooled(9, 2)),
    ("maps.AttentionMap.value_norms", TypeError, lambda: amap().value_norms(BAD, X[0])),
    ("maps.AttentionMap.value_norms", ValueError, lambda: amap().value_norms(K, X)),
    ("maps.AttentionMap.divergence", TypeError, lambda: amap().divergence(BAD)),
    ("maps.AttentionMap.divergence", ValueError, lambda: amap().divergence(amap().only(heads=0))),
    ("maps.AttentionMap.statistics", TypeError, lambda: amap().statistics("top")),
    ("maps.AttentionMap.statistics", ValueError, lambda: amap().statistics(BAD)),
    ("maps.AttentionMap.save", ValueError, lambda: in_a_folder(lambda folder: ruled().save(folder / "map"))),
    ("maps.AttentionMap.view", TypeError, lambda: amap().view(3)),
    ("maps.AttentionMap.view", ValueError, lambda: amap().view(Seen())),
    ("maps.AttentionMap.view", OSError, lambda: amap().view(port=70_000)),
    ("maps.AttentionMap.save", OSError, lambda: amap().save(ABSENT)),
    ("maps.AttentionMap.open", ValueError, lambda: mh.AttentionMap.open(__file__)),
    ("maps.AttentionMap.open", OSError, lambda: mh.AttentionMap.open(ABSENT)),
    # measures
    ("measures.previous_token", TypeError, lambda: measures.previous_token(BAD)),
    ("measures.current_token", TypeError, lambda: measures.current_token(BAD)),
    ("measures.first_token", TypeError, lambda: measures.first_token(BAD)),
    ("measures.duplicate_token", TypeError, lambda: measures.duplicate_token(amap(), BAD)),
    ("measures.duplicate_token", TypeError, lambda: measures.duplicate_token(BAD, IDS)),
    ("measures.duplicate_token", ValueError, lambda: measures.duplicate_token(amap(), IDS[:, :2])),
    ("measures.induction", TypeError, lambda: measures.induction(amap(), BAD)),
    ("measures.induction", TypeError, lambda: measures.induction(BAD, IDS)),
    ("measures.induction", ValueError, lambda: measures.induction(amap(), IDS[:, :2])),
    ("measures.local", TypeError, lambda: measures.local(amap(), BAD)),
    ("measures.local", TypeError, lambda: measures.local(BAD, 1)),
    ("measures.local", ValueError, lambda: measures.local(amap(), -1)),
    ("measures.rollout", TypeError, lambda: measures.rollout(BAD)),
    ("measures.rollout", TypeError, lambda: measures.rollout([amap()], rows=BAD)),
    ("measures.rollout", ValueError, lambda: measures.rollout([amap()])),
    ("measures.rollout", IndexError, lambda: measures.rollout([amap()], rows=9)),
    # observe
    ("observe.observe", TypeError, lambda: observing(model=BAD)),
    ("observe.observe", ValueError, lambda: observing(keep=BAD)),
    ("observe.observe", MemoryError, lambda: observing(max_bytes=10)),
    ("observe.seen.open_run", ValueError, lambda: mh.open_run(__file__)),
    ("observe.seen.open_run", OSError, lambda: mh.open_run(ABSENT)),
    ("observe.seen.Seen.calls", NoSuchLayer, lambda: seen().calls(BAD)),
    ("observe.seen.Seen.calls", TypeError, lambda: seen().calls(cast(Any, 1.5))),
    ("observe.seen.Seen.__getitem__", NoSuchLayer, lambda: seen()[BAD]),
    ("observe.seen.Seen.__getitem__", TypeError, lambda: seen()[cast(Any, 1.5)]),
    ("observe.seen.Seen.label", TypeError, lambda: seen().label(BAD)),
    ("observe.seen.Seen.label", ValueError, lambda: seen().label(["a"])),
    ("observe.seen.Seen.table", TypeError, lambda: seen().table(BAD)),
    ("observe.seen.Seen.table", ValueError, lambda: seen().table(IDS[:, :2])),
    ("observe.seen.Seen.view", TypeError, lambda: seen().view(3)),
    ("observe.seen.Seen.view", ValueError, lambda: Seen().view()),
    ("observe.seen.Seen.view", OSError, lambda: seen().view(port=70_000)),
    ("observe.seen.Seen.plot", ValueError, lambda: Seen().plot()),
    ("observe.seen.Seen.save", ValueError,
     lambda: in_a_folder(lambda folder: ruled_run().save(folder / "run"))),
    ("observe.seen.Seen.save", OSError, lambda: seen().save(ABSENT)),
    ("observe.seen.Table.sorted", ValueError, lambda: seen().table().sorted(BAD)),
    ("observe.seen.Table.to_pandas", ImportError, without_pandas),
    ("observe.reduced.Reduced.of", TypeError, lambda: Reduced.of(amap(), {"top": ()})),
    ("observe.reduced.Reduced.of", ValueError, lambda: Reduced.of(amap(), {BAD: ()})),
    ("observe.reduced.Reduced.labelled", TypeError,
     lambda: Reduced.of(amap(), {"entropy": ()}).labelled(BAD)),
    ("observe.reduced.Reduced.labelled", ValueError,
     lambda: Reduced.of(amap(), {"entropy": ()}).labelled(["a"])),
    ("observe.reduced.Reduced.stored", ValueError,
     lambda: Reduced.of(amap(), {"mass": mh.Causal()}).stored()),
    ("observe.reduced.Reduced.restored", ValueError, lambda: Reduced.restored(files.Kept({}, {}))),
    ("observe.here.attend", ValueError, lambda: attending(Q.to("meta"), K.to("meta"))),
    ("observe.here.attend", MemoryError, lambda: attending(Q, K, max_bytes=10)),
    # figures
    ("figures.head", TypeError, lambda: figures.head(BAD)),
    ("figures.head", ValueError, lambda: figures.head(Q)),
    ("figures.beside", TypeError, lambda: figures.beside(BAD, BAD)),
    ("figures.beside", ValueError, lambda: figures.beside(X[0], X[0, :2])),
    ("figures.grid", TypeError, lambda: figures.grid(BAD)),
    ("figures.grid", ValueError, lambda: figures.grid(X)),
    ("figures.visible", TypeError, lambda: figures.visible(BAD, 0, 0)),
    ("figures.visible", IndexError, lambda: figures.visible(amap(), 9, 0)),
    ("figures.received", TypeError, lambda: figures.received(BAD)),
    ("figures.received", ValueError, lambda: figures.received(amap(), normalize=BAD)),
    ("figures.entropy", TypeError, lambda: figures.entropy(BAD)),
    ("figures.entropy", ValueError, lambda: figures.entropy([])),
    ("figures.measures", TypeError, lambda: figures.measures([3])),
    ("figures.measures", ValueError, lambda: figures.measures([])),
    ("figures.difference.difference", ValueError, lambda: figures.difference(Q, Q)),
    ("figures.positions.curves", TypeError, lambda: figures.curves(BAD, [0])),
    ("figures.positions.curves", ValueError, lambda: figures.curves(X[0], [99])),
    ("figures.positions.image", TypeError, lambda: figures.image(BAD)),
    ("figures.positions.image", ValueError, lambda: figures.image(Q)),
    # the checker
    ("checker.check", checker.Unclear, lambda: checker.check(BAD)),
    ("checker.assert_attention", checker.Unclear, lambda: checker.assert_attention(BAD)),
    ("checker.assert_attention", AssertionError, lambda: checker.assert_attention(values_alone, "attention")),
    ("checker.report.Report.save_json", OSError, lambda: REPORT.save_json(BEHIND_A_FILE)),
    ("checker.report.Report.save_junit", OSError, lambda: REPORT.save_junit(BEHIND_A_FILE)),
    ("checker.report.Report.save_picture", OSError, lambda: REPORT.save_picture(BEHIND_A_FILE)),
    # the language model
    ("lm.model.Config", TypeError, lambda: lm.Config(BAD)),
    ("lm.model.Config", ValueError, lambda: lm.Config(0)),
    ("lm.model.LanguageModel", TypeError, lambda: lm.LanguageModel(BAD)),
    ("lm.model.LanguageModel", ValueError, lambda: lm.LanguageModel(TINY.config, 2.0)),
    ("lm.model.LanguageModel.forward", TypeError, lambda: TINY(BAD)),
    ("lm.model.LanguageModel.forward", ValueError, lambda: TINY(IDS + 99)),
    ("lm.model.LanguageModel.attend", TypeError, lambda: TINY.attend(BAD)),
    ("lm.model.LanguageModel.attend", ValueError, lambda: TINY.attend(IDS + 99)),
    ("lm.model.LanguageModel.stretched", TypeError, lambda: TINY.stretched(BAD)),
    ("lm.model.LanguageModel.stretched", ValueError, lambda: TINY.stretched(7)),
    ("lm.model.LanguageModel.caches", TypeError, lambda: TINY.caches(BAD)),
    ("lm.model.LanguageModel.caches", ValueError, lambda: TINY.caches(0)),
    ("lm.model.LanguageModel.check", TypeError, lambda: TINY.check(BAD, None)),
    ("lm.model.LanguageModel.check", ValueError, lambda: TINY.check(X, None)),
    ("lm.generate.Sampling", TypeError, lambda: lm.Sampling(top_k=BAD)),
    ("lm.generate.Sampling", TypeError, lambda: lm.Sampling(temperature=BAD)),
    ("lm.generate.Sampling", ValueError, lambda: lm.Sampling(-1)),
    ("lm.generate.Sampling", ValueError, lambda: lm.Sampling(top_p=0.0)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, IDS[:1], BAD)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, BAD, 1)),
    ("lm.generate.generate", ValueError, lambda: lm.generate(TINY, IDS, 1)),
    ("lm.generate.complete", TypeError, lambda: lm.complete(*lm.load(), "a", BAD)),
    ("lm.generate.complete", ValueError, lambda: lm.complete(*lm.load(), "")),
    ("lm.generate.stream", TypeError, lambda: lm.stream(*lm.load(), "a", BAD)),
    ("lm.generate.stream", ValueError, lambda: lm.stream(*lm.load(), "")),
    ("lm.checkpoint.load", FileNotFoundError, lambda: lm.load(ABSENT)),
    ("lm.checkpoint.load", ValueError, lambda: in_a_folder(no_model)),
    ("lm.checkpoint.save", OSError, lambda: lm.save(Path(__file__), *lm.load())),
    ("lm.train.Options", TypeError, lambda: lm.Options(steps=BAD)),
    ("lm.train.Options", TypeError, lambda: lm.Options(learning_rate=BAD)),
    ("lm.train.Options", ValueError, lambda: lm.Options(dropout=7.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(clip=-1.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(decay=-1.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(steps=0)),
    ("lm.train.Options.config", TypeError, lambda: lm.Options().config(BAD)),
    ("lm.train.Options.config", ValueError, lambda: lm.Options().config(0)),
    ("lm.train.Options.check_memory", ValueError, lambda: lm.Options().check_memory(10**15)),
    ("lm.train.train", TypeError, lambda: lm.train(ABSENT, {"steps": BAD})),
    ("lm.train.train", ValueError, lambda: lm.train(ABSENT, {"steps": 0})),
    ("lm.train.train", OSError, lambda: lm.train(__file__)),
    # models by their names
    ("models.load", FileNotFoundError, lambda: models.load(ABSENT)),
    ("models.load", ValueError, lambda: in_a_folder(of_theirs)),
    ("models.load", ImportError, without_transformers),
    ("models.Model.read", ValueError, lambda: models.load().read([-1])),
    # the classic faces
    ("classic.modeling_attention.SelfAttention", TypeError, lambda: modeling_attention.SelfAttention(BAD, 1)),
    ("classic.modeling_attention.SelfAttention", ValueError, lambda: modeling_attention.SelfAttention(0, 1)),
    ("classic.modeling_attention.SelfAttention.forward", TypeError, lambda: FIRST(BAD)),
    ("classic.modeling_attention.SelfAttention.forward", ValueError, lambda: FIRST(X[0])),
    ("classic.modeling_attention.SelfAttention.attend", TypeError, lambda: FIRST.attend(X, mask=MASK)),
    ("classic.modeling_attention.SelfAttention.attend", ValueError, lambda: FIRST.attend(X[0])),
    ("classic.modeling_attention.MultiHeadSelfAttention", TypeError,
     lambda: modeling_attention.MultiHeadSelfAttention(12, 12, BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention", ValueError,
     lambda: modeling_attention.MultiHeadSelfAttention(12, 12, 5)),
    ("classic.modeling_attention.MultiHeadSelfAttention.forward", TypeError, lambda: FIRST_HEADS(BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention.forward", ValueError, lambda: FIRST_HEADS(X[0])),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", TypeError,
     lambda: FIRST_HEADS.attend(X, mask=MASK)),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", ValueError,
     lambda: FIRST_HEADS.attend(X[0])),
    ("classic.torch_multihead.MultiheadAttention", TypeError,
     lambda: torch_multihead.MultiheadAttention(12, BAD)),
    ("classic.torch_multihead.MultiheadAttention", ValueError,
     lambda: torch_multihead.MultiheadAttention(12, 0)),
    ("classic.torch_multihead.MultiheadAttention", torch_multihead.Refused,
     lambda: torch_multihead.MultiheadAttention(12, 5)),
    ("classic.torch_multihead.MultiheadAttention.forward", TypeError, lambda: SECOND(BAD, X, X)),
    ("classic.torch_multihead.MultiheadAttention.forward", torch_multihead.Refused, lambda: SECOND(Q, Q, Q)),
    ("classic.torch_multihead.MultiheadAttention.attend", TypeError, lambda: SECOND.attend(BAD, X, X)),
    ("classic.torch_multihead.MultiheadAttention.attend", torch_multihead.Refused,
     lambda: SECOND.attend(Q, Q, Q)),
    ("classic.torch_multihead.replace", TypeError, lambda: torch_multihead.replace(BAD)),
    ("classic.components.PositionalEncoder", TypeError, lambda: components.PositionalEncoder(BAD)),
    ("classic.components.PositionalEncoder", ValueError, lambda: components.PositionalEncoder(3)),
    ("classic.components.PositionalEncoder.forward", TypeError,
     lambda: components.PositionalEncoder(12)(BAD)),
    ("classic.components.PositionalEncoder.forward", ValueError,
     lambda: components.PositionalEncoder(12, 2)(X)),
    ("classic.components.attention", TypeError, lambda: components.attention(X, X, BAD)),
    ("classic.components.attention", ValueError, lambda: components.attention(X, X[..., :3], X)),
    ("classic.components.CrossAttention", TypeError, lambda: components.CrossAttention(12, 6, 4, BAD)),
    ("classic.components.CrossAttention", ValueError, lambda: components.CrossAttention(12, 6, 4, 0)),
    ("classic.components.CrossAttention.forward", TypeError, lambda: THIRD_CROSS(X, BAD)),
    ("classic.components.CrossAttention.forward", ValueError, lambda: THIRD_CROSS(X, X)),
    ("classic.components.CrossAttention.attend", TypeError, lambda: THIRD_CROSS.attend(X, BAD)),
    ("classic.components.CrossAttention.attend", ValueError, lambda: THIRD_CROSS.attend(X, X)),
    ("classic.components.SelfAttention", TypeError, lambda: components.SelfAttention(12, 4, BAD)),
    ("classic.components.SelfAttention", ValueError, lambda: components.SelfAttention(12, 4, 0)),
    ("classic.components.SelfAttention.forward", TypeError, lambda: THIRD(X, MASK)),
    ("classic.components.SelfAttention.forward", ValueError, lambda: THIRD(X[0])),
    ("classic.components.SelfAttention.attend", TypeError, lambda: THIRD.attend(X, MASK)),
    ("classic.components.SelfAttention.attend", ValueError, lambda: THIRD.attend(X[0])),
    ("classic.components.MultiHeadedAttention", TypeError,
     lambda: components.MultiHeadedAttention([BAD], 12)),
    ("classic.components.MultiHeadedAttention", ValueError, lambda: components.MultiHeadedAttention([], 12)),
    ("classic.components.MultiHeadedAttention.forward", TypeError, lambda: THIRD_HEADS(BAD)),
    ("classic.components.MultiHeadedAttention.forward", ValueError, lambda: THIRD_HEADS(X[0])),
    ("classic.components.MultiHeadedAttention.attend", TypeError, lambda: THIRD_HEADS.attend(BAD)),
    ("classic.components.MultiHeadedAttention.attend", ValueError, lambda: THIRD_HEADS.attend(X[0])),
    ("classic.annotated.PrepareForMultiHeadAttention", TypeError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, BAD, True)),
    ("classic.annotated.PrepareForMultiHeadAttention", ValueError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, 0, True)),
    ("classic.annotated.PrepareForMultiHeadAttention.forward", TypeError, lambda: PREPARE(BAD)),
    ("classic.annotated.PrepareForMultiHeadAttention.forward", ValueError, lambda: PREPARE(Q)),
    ("classic.annotated.MultiHeadAttention", TypeError, lambda: annotated.MultiHeadAttention(BAD, 12)),
    ("classic.annotated.MultiHeadAttention", ValueError, lambda: annotated.MultiHeadAttention(5, 12)),
    ("classic.annotated.MultiHeadAttention.get_scores", TypeError, lambda: FOURTH.get_scores(BAD, Q)),
    ("classic.annotated.MultiHeadAttention.get_scores", ValueError, lambda: FOURTH.get_scores(X, Q)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", TypeError,
     lambda: FOURTH.prepare_mask(BAD, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", ValueError,
     lambda: FOURTH.prepare_mask(MASK, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.forward", TypeError, lambda: FOURTH(query=BAD, key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.forward", ValueError, lambda: FOURTH(query=X[0], key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.attend", TypeError,
     lambda: FOURTH.attend(query=BAD, key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.attend", ValueError,
     lambda: FOURTH.attend(query=X[0], key=X, value=X)),
]  # fmt: skip

# What raises nothing of its own, and so names nothing.
NEVER = {
    # A kernel or a map asks, with positions of a problem that was checked.
    "masks.Mask.keep",
    "masks.Mask.span",
    "masks.Mask.bind",
    "masks.Mask.only",
    "masks.Ids.key",
    "masks.Ids.query",
    "masks.Ids.match",
    "masks.Ids.span",
    "biases.Bias.add",
    "biases.Bias.collect",
    "biases.Bias.bind",
    "biases.Bias.only",
    # Our own code gives it values that it has checked.
    "values.Value.but",
    "values.Value.map",
    "observe.seen.Seen.add",
    "observe.seen.Table.of",
    "observe.reduced.Reduced.followed_by",
    "lm.model.LanguageModel.embed",
    "lm.model.LanguageModel.logits",
    # Containers, which the library fills.
    "observe.reduced.Reduced",
    "observe.seen.Seen",
    "observe.seen.Table",
    "observe.seen.Table.__getitem__",
    "lm.generate.Text",
    "models.Model",
    "checker.checks.registry.Check",
    "checker.diagnosis.Diagnosis",
    "checker.report.Report",
    # Any truth value, step or console will do.
    "maps.AttentionMap.compact",
    "lm.train.Options.cut_at",
    "lm.train.Options.rate_at",
    "checker.report.Report.print",
    # Logits come from a model.
    "lm.generate.Sampling.draw",
}


def raised_in(function: Callable[..., Any]) -> set[str]:
    """The exceptions that a function's own body raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    called = [node.func if isinstance(node, ast.Call) else node for node in raised]
    return {node.id for node in called if isinstance(node, ast.Name)} - {"NotImplementedError"}


def exception(name: str) -> type[BaseException]:
    """The class of a name that a docstring has."""
    ours = {one.__name__: one for one in (torch_multihead.Refused, checker.Unclear, NoSuchLayer)}
    return ours[name] if name in ours else getattr(builtins, name)


def test_what_can_be_given_wrong_names_its_errors() -> None:
    silent = [name.path for name in surface() if name.parameters() and not name.errors()]
    inherited = {name.path for name in surface() if not name.own}
    assert set(silent) - inherited == NEVER


def test_what_is_raised_is_named() -> None:
    lacking = []
    for name in surface():
        if isinstance(name.what, property):
            continue
        for function in inits(name.what) if inspect.isclass(name.what) else [name.what]:
            named = [exception(one) for one in name.errors()]
            lacking += [
                f"{name.path}: {one}"
                for one in raised_in(function)
                if not issubclass(exception(one), tuple(named))
            ]
    assert lacking == []


def test_what_is_named_exists_and_is_provoked() -> None:
    named = {(name.path, exception(one)) for name in surface() if name.own for one in name.errors()}
    provoked = {(path, error) for path, error, _ in WRONG}
    assert sorted(f"{path}: {error.__name__}" for path, error in named ^ provoked) == []


@pytest.mark.parametrize(
    ("path", "error", "call"),
    WRONG,
    ids=[f"{n} {path} {error.__name__}" for n, (path, error, _) in enumerate(WRONG)],
)
def test_it_is_raised(path: str, error: type[Exception], call: Callable[[], Any]) -> None:
    """By a line of ours, in a sentence of ours: not from deep inside of something else."""
    with pytest.raises(error) as caught:
        call()
    if isinstance(caught.value, OSError) or path == "values.Value.to":  # the disk's words, and PyTorch's
        return
    last = [frame for frame, _ in walk_tb(caught.value.__traceback__)][-1]
    assert Path(last.f_code.co_filename).is_relative_to(HOME)
    if error is not AssertionError:  # which shows a whole report
        message = str(caught.value)
        assert message[-1] in ".)", message
        assert "\n" not in message


# -- sources ---------------------------------------------------------------------------------------

SOURCED = ("masks", "biases", "positions", "measures", "cache", "functional", "layers", "maps", "classic")
SOURCED_NAMES = {f"maps.AttentionMap.{name}" for name in reductions.BY_NAME} | {
    "lm.model.LanguageModel",
    "lm.generate.Sampling",
    "lm.train.train",
}
# What follows nobody: tools, and what is plain arithmetic.
NO_SOURCE = {
    "masks.Mask",
    "functional.explain",
    "classic.torch_multihead.replace",
    "maps.AttentionMap.top",
    "maps.AttentionMap.pooled",
    "classic.torch_multihead.Refused",
    "classic.test_values.SelfAttentionTestValues",
    "classic.test_values.MultiHeadAttentionTestValues",
}


def cited(name: Name) -> bool:
    """Is there a source, in its docstring or in a paragraph of its module's that names it?"""
    paragraphs = (sys.modules[name.what.__module__].__doc__ or "").split("\n\n")
    about = [one for one in paragraphs if f"`{name.what.__name__}`" in one]
    return any(CITES.search(one) for one in (name.doc, *about))


def test_what_is_built_after_a_source_names_it() -> None:
    asked = [
        name
        for name in surface()
        if name.path in SOURCED_NAMES or (name.path.startswith(SOURCED) and not name.inside())
    ]
    assert len(asked) > 50
    assert {name.path for name in asked if not cited(name)} == NO_SOURCE
