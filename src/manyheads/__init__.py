"""Multi-head attention you can see through: exact, fast, and every head's weights at any length."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import_module(f"{__name__}.startup")  # it records facts about the process before torch is imported

TYPE_CHECKING = False  # typing's own constant takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any

    # `as` tells type checkers that the name is public.
    from manyheads import measures as measures
    from manyheads.acceleration import accelerate as accelerate
    from manyheads.biases import ALiBi as ALiBi
    from manyheads.biases import Dense as Dense
    from manyheads.biases import Relative as Relative
    from manyheads.cache import Cache as Cache
    from manyheads.functional import attention as attention
    from manyheads.functional import attention_with_map as attention_with_map
    from manyheads.functional import explain as explain
    from manyheads.layers import CrossAttention as CrossAttention
    from manyheads.layers import MultiHeadAttention as MultiHeadAttention
    from manyheads.layers import SelfAttention as SelfAttention
    from manyheads.maps import AttentionMap as AttentionMap
    from manyheads.masks import AfterSameToken as AfterSameToken
    from manyheads.masks import Causal as Causal
    from manyheads.masks import Diagonal as Diagonal
    from manyheads.masks import Documents as Documents
    from manyheads.masks import Drop as Drop
    from manyheads.masks import Full as Full
    from manyheads.masks import Keep as Keep
    from manyheads.masks import Keys as Keys
    from manyheads.masks import Lengths as Lengths
    from manyheads.masks import Mask as Mask
    from manyheads.masks import Prefix as Prefix
    from manyheads.masks import Rule as Rule
    from manyheads.masks import SameToken as SameToken
    from manyheads.masks import Window as Window
    from manyheads.observe import observe as observe
    from manyheads.observe import open_run as open_run
    from manyheads.onnx import from_onnx_attention as from_onnx_attention
    from manyheads.patches import Patches as Patches
    from manyheads.patches import find_patches as find_patches
    from manyheads.positions import Rotary as Rotary
    from manyheads.positions import Sinusoidal as Sinusoidal
    from manyheads.tokens import TokenizedText as TokenizedText

__version__ = "0.1.0"

# The module of each public name. It is imported when the name is first used (PEP 562), because importing
# torch takes seconds and `manyheads --help` doesn't need it.
_MODULES = {
    name: module
    for module, names in {
        "acceleration": ["accelerate"],
        "biases": ["ALiBi", "Dense", "Relative"],
        "cache": ["Cache"],
        "functional": ["attention", "attention_with_map", "explain"],
        "layers": ["CrossAttention", "MultiHeadAttention", "SelfAttention"],
        "maps": ["AttentionMap"],
        "masks": ["AfterSameToken", "Causal", "Diagonal", "Documents", "Drop", "Full", "Keep", "Keys",
                  "Lengths", "Mask", "Prefix", "Rule", "SameToken", "Window"],
        "observe": ["observe", "open_run"],
        "onnx": ["from_onnx_attention"],
        "patches": ["Patches", "find_patches"],
        "positions": ["Rotary", "Sinusoidal"],
        "tokens": ["TokenizedText"],
    }.items()
    for name in names
}  # fmt: skip

__all__ = [*_MODULES, "measures"]

if not TYPE_CHECKING:  # with a `__getattr__`, type checkers accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name or a submodule at its first use."""
        path = f"{__name__}.{_MODULES.get(name, name)}"
        try:
            value = import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        if name in _MODULES:
            value = globals()[name] = getattr(value, name)
        return value


def __dir__() -> list[str]:
    """Return all public names, including those that aren't imported yet."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The type of this module. It ensures that `manyheads.observe` is the function, not the subpackage.

    When a submodule is first imported, the import system sets it as an attribute of its package.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "observe" and isinstance(value, ModuleType):
            value = value.observe
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
