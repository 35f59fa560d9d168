"""Constructor options that are off by default: each is turned on in a build of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyheads.checker.candidates import names
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.construct import has_implementations
from manyheads.checker.candidates.documentation import lines_about
from manyheads.checker.isolation.describe import Argument

MOST = 10  # settings that are judged, each in about half a second
MOST_PLAUSIBLE = 6  # sets of parts beside which a bug is searched for
MOST_FLAGS = 4  # other options that a setting may need, which are tried
OFF = (None, False, 0, -1)


class Option(NamedTuple):
    """Constructor options of one meaning.

    Attributes:
        pattern: Matches their names.
        value: The value that turns them on.
        is_complete: Whether their meaning is certain: a call that raises an error is a failure, and an output
            that no known bug explains isn't judged.
        has_effect: Whether outputs must change.
        other: Matches documentation that gives them another meaning.
    """

    pattern: str
    value: bool | int | float
    is_complete: bool = False
    has_effect: bool = True
    other: str = r"(?!)"


def one_of(listed: Iterable[str]) -> str:
    """Return a pattern that matches these names."""
    return "|".join(map(re.escape, listed))


SWITCH = r"(?:(?:use|with|has|apply|enable|add|is|do)_)?"
CAUSAL = Option(one_of(names.CONSTRUCTOR["causal"][1]), False, True, other=r"\bcache|\bhint|\bonly if\b")
OPTIONS = (
    Option(
        one_of(names.CONSTRUCTOR[names.KEY_HEADS][1]),
        names.GROUPS,
        True,
        other=r"\bnorm|\bchannels?\b|\bconv",
    ),
    Option(
        names.WINDOW.pattern,
        names.WINDOW_SIZE,
        other=r"\bdilat|\bstride|\bshift|\bpatch|\bsquare|\d ?[x×] ?\d",
    ),
    Option(rf"{SWITCH}(?:qk|q_k|query_key)_?(?:\w*norm|ln|normali[sz]\w+)|norm(?:ali[sz]e)?_qk", True, True),
    CAUSAL,
    Option(
        rf"{SWITCH}(?:rope|rotary)(?:_emb|_pos_emb|_embeddings?|_encoding)?|(?:rotary|rope|rot)_(?:dim|ndims)",
        True,
    ),
    Option(rf"{SWITCH}alibi(?:_bias)?", True),
    Option(
        one_of(names.CALL["softcap"]) + r"|\w*soft_?cap(?:ping)?", 2.0, True, other=r"\bclip|\bclamp|\bhard"
    ),
    Option(
        one_of(names.CALL["scale"])
        + r"|(?:attn|attention|qk|query|logit)_(?:scale|scaling)|attention_multiplier",
        0.3,
        True,
        other=r"\bextra\b|\badditional|\bbesides|\bon top|\btemperature|\binit|\blearn|\bembedding|\btimes\b",
    ),
    Option(
        one_of(names.CONSTRUCTOR["a bias"][1]) + r"|(?:out|o|proj|output|attn_out|kv|q|k|v)_(?:proj_)?bias",
        True,
        True,
        has_effect=False,
        other=r"\brelative|\bposition|\bscores?\b|\blogits?\b|\bmask",
    ),
    Option(rf"{SWITCH}(?:output_|attn_|attention_|head_)?gat(?:e|ed|ing)", True),
    Option(rf"{SWITCH}(?:learned_|attn_|attention_)*sinks?", True),
    Option(
        rf"{SWITCH}(?:relative_attention_bias|rel(?:ative)?_(?:pos|position)(?:_bias)?|rel(?:ative)?_bias)",
        True,
    ),
    Option(rf"{SWITCH}(?:kv_)?cache", True, has_effect=False),
)

CACHE_FLAG = Option(r"(?!)", True, True, has_effect=False)  # any flag that a cache needs


@dataclass(frozen=True)
class Setting:
    """An option of a constructor with another value than in the default build.

    Attributes:
        name: The name of the argument, or of the field of a configuration.
        value: Its value.
        default: Its value in the default build.
        option: What it means.
        init: The constructor arguments of the build.
    """

    name: str
    value: bool | int | float
    default: Any
    option: Option
    init: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


class Place(NamedTuple):
    """An option of a class's constructor, or of a configuration that it takes.

    Attributes:
        argument: The option.
        value: Its value in the default build.
        owner: The argument that takes the configuration, or "".
        init: The constructor arguments that the user gave; of a configuration, its fields.
    """

    argument: Argument
    value: Any
    owner: str
    init: Mapping[str, Any]

    def set(self, adapter: AttentionAdapter, value: Any) -> dict[str, Any]:
        """Return the constructor arguments of a build with another value."""
        changed = {**self.init, self.argument.name: value}
        return {**adapter.options.init, self.owner: changed} if self.owner else changed


def find_places(adapter: AttentionAdapter) -> Iterator[Place]:
    """Yield the options of a candidate, of a configuration those in its code."""
    description, init = adapter.description, adapter.options.init
    for argument in description.init or ():
        if argument.is_named:
            yield Place(argument, adapter.init.get(argument.name, argument.default), "", init)
    for owner, configuration in description.configurations.items():
        values, given = adapter.init[owner]["values"], init.get(owner, {})
        for field in configuration.fields if isinstance(given, Mapping) else ():
            if re.search(rf"\b{re.escape(field.name)}\b", description.source):
                yield Place(field, values.get(field.name, field.default), owner, given)


def find_settings(adapter: AttentionAdapter) -> list[Setting]:
    """Return the settings to judge besides the default build, the likely sources of bugs first."""
    if adapter.description.type != "class" or has_implementations(adapter.description):
        return []
    found = [
        Setting(place.argument.name, value, place.value, option, place.set(adapter, value))
        for place in find_places(adapter)
        if place.argument.name not in place.init
        for option, value in turn_on(adapter, place.argument, place.value)
    ]
    return sorted(found, key=lambda setting: OPTIONS.index(setting.option))


def widen(adapter: AttentionAdapter) -> dict[str, Any] | None:
    """Return the constructor arguments of a build of another width, or None."""
    places = [
        place
        for place in find_places(adapter)
        if names.constructor_value(place.argument.name)[0] == names.MODEL_WIDTH
    ]
    is_class = adapter.description.type == "class"
    if not is_class or len(places) != 1 or type(places[0].value) is not int:
        return None
    return places[0].set(adapter, 3 * places[0].value)


def turn_on(adapter: AttentionAdapter, argument: Argument, value: Any) -> Iterator[tuple[Option, Any]]:
    """Yield the meaning of an option, and the value that turns it on, if it is recognised and off."""
    option = next((each for each in OPTIONS if re.fullmatch(each.pattern, argument.name, re.I)), None)
    if option is None or re.search(option.other, lines_about(argument.name, adapter.text), re.I):
        return
    if option is CAUSAL:
        if value is True and "causal" not in adapter.arguments:  # of the call, which may say so too
            yield option, False
        return
    on = option.value
    if isinstance(on, bool) and re.search(r"dim", argument.name):
        on = names.GROUPS  # of the entries of a head
    off: tuple[Any, ...] = OFF
    if option is OPTIONS[0] and adapter.weights is not None:
        off, on = (*OFF, adapter.weights.heads), max(1, adapter.weights.heads // 2)
    is_flag = isinstance(on, bool)
    if value in off and isinstance(value, bool) == is_flag and fits_annotation(argument.annotation, on):
        yield option, on


def fits_annotation(annotation: str, value: Any) -> bool:
    """Return True if an annotation allows a value, or says nothing."""
    types = {bool: r"\bbool", int: r"\b(?:int|float)", float: r"\bfloat"}
    return not annotation or re.search(types[type(value)], annotation) is not None
