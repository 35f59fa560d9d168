"""timm's Attention where torchvision, which timm's models need and its attention doesn't, isn't installed."""

import sys
import types
from importlib.util import find_spec

PACKAGE = find_spec("timm")
for name in ("timm", "torchvision", "torchvision.ops", "torchvision.ops.misc"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
sys.modules["timm"].__path__ = list(PACKAGE.submodule_search_locations)
sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (), {})

from timm.layers.attention import Attention  # noqa: E402, F401
