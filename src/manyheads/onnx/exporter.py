"""Export to ONNX: one call, which says how each call of attention was exported and compares the outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from manyheads import extras
from manyheads.cache import Cache
from manyheads.kernels import exported
from manyheads.kernels.exported import CHOICES, FIRST_OPSET, Call, Target
from manyheads.shapes import kind, sizes, whole

# The largest allowed difference between the outputs of onnxruntime and of PyTorch, relative to the largest
# number of the output. Both round each operator of the model, in different orders.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LEAST_OPSET = 18  # the first version of which PyTorch's exporter has the operators
LAST_OPSET = 24  # the last version whose Attention operator has been tested


@dataclass
class Report:
    """An exported model: how its calls of attention were exported, and how its outputs compare.

    Attributes:
        program: PyTorch's ONNXProgram. `program.model_proto` is the model, and `program(x)` runs it in
            onnxruntime.
        calls: Each call of `manyheads.attention`, in order: `module` is the name of the module that called
            it, `operator` is True if it became an `Attention` operator, and `reasons` say why not.
        opset: The version of the standard.
        difference: The largest difference between the outputs of onnxruntime and PyTorch, as a multiple of
            the largest number of an output; None if they weren't compared.
    """

    program: Any
    calls: list[Call]
    opset: int
    difference: float | None
    _model: Callable[..., Any]

    def compare(self, *args: Any, **kwargs: Any) -> float:
        """Compare the outputs of onnxruntime and of PyTorch, for inputs of any allowed length.

        Args:
            *args: The arguments of the model.
            **kwargs: Its keyword arguments.

        Returns:
            The largest difference, as a multiple of the largest number of an output.

        Raises:
            ImportError: If onnxruntime isn't installed.
            ValueError: If the difference is larger than `TOLERANCE` of the output's dtype, or onnxruntime
                doesn't support the model or the inputs.
        """
        _need("comparing the outputs", "onnxruntime")
        with torch.no_grad():
            expected = _tensors(self._model(*args, **kwargs))
        try:
            got = self.program(*args, **kwargs)
        except Exception as error:  # onnxruntime's errors have no public base class
            reason = str(error).splitlines()[0].rstrip(". ")
            raise ValueError(
                f"Expected a model and inputs that onnxruntime supports, got its error {reason!r}. For a "
                "dtype that it doesn't support, export with check=False."
            ) from error
        if len(got) != len(expected):
            raise ValueError(
                f"Expected {len(expected)} outputs of onnxruntime, as the model has, got {len(got)}."
            )
        return max(map(_difference, got, expected), default=0.0)

    def __str__(self) -> str:
        operators = sum(call.operator for call in self.calls)
        counts = f"{operators} of {len(self.calls)} calls of attention are operators"
        lines = [f"ONNX, opset {self.opset}: {counts}"]
        lines += [f"  {call}" for call in self.calls]
        if self.difference is not None:
            lines.append(f"  largest difference in onnxruntime: {self.difference:.1g} of the largest output")
        return "\n".join(lines)

    __repr__ = __str__


def export(
    model: nn.Module | torch.export.ExportedProgram | Callable[..., Any],
    args: Sequence[Any] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = FIRST_OPSET,
    attention: str = "auto",
    check: bool = True,
    **options: Any,
) -> Report:
    """Export a model to ONNX, by `torch.onnx.export(dynamo=True)`.

    Each call of `manyheads.attention` becomes an operator `Attention` of the standard
    (https://onnx.ai/onnx/operators/onnx__Attention.html) if that computes the same, else plain operators.
    The report gives the reasons. `torch.onnx.export` itself works too, without a report; it uses the operator
    if called with `opset_version=23`, but not for softcap.

    Args:
        model: A module in evaluation mode, a function, or a program of `torch.export.export`.
        args: Example arguments of the model.
        path: The file to write. If None, no file is written.
        kwargs: Example keyword arguments of the model.
        dynamic_shapes: The sizes that may change, as `torch.export.export` takes them: `({1: Dim("t")},)`.
        opset_version: The version of the standard, 18 to 24. The operator needs 23, which onnxruntime
            supports from 1.23 on.
        attention: "auto" uses the operator where every runtime computes the same. "operator" uses it also for
            softcap with a mask, which onnxruntime computes as the standard says from 1.28 on, and raises an
            error where the operator doesn't compute the problem. "plain" uses plain operators.
        check: Whether to run the example arguments in onnxruntime and compare the outputs.
        **options: Other arguments of `torch.onnx.export`, such as `input_names`.

    Returns:
        The report.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime isn't installed.
        TypeError: If the model isn't a module, a function or an exported program, or an argument has the
            wrong type or is missing.
        ValueError: If an option is wrong, the model is in training mode, attention can't be exported, or the
            outputs of onnxruntime and PyTorch differ.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        _need("manyheads.onnx.export", package)
    if attention not in CHOICES:
        raise ValueError(f"Expected attention to be one of {', '.join(CHOICES)}, got {attention!r}.")
    whole(opset_version, "opset_version", LEAST_OPSET, LAST_OPSET)
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        raise TypeError(f"Expected args to be a tuple of arguments, got {kind(args)}: write (x,).")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"Expected kwargs to be arguments by name, got {kind(kwargs)}: write {{'x': x}}.")
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"Expected path to be the file to write, or None, got {path!r}.")
    if options.pop("dynamo", True) is not True:
        raise ValueError("Expected dynamo=True: the older exporter of PyTorch isn't supported. Leave it out.")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"Expected a path in an existing folder, got {os.fspath(path)!r}. Create the folder."
        )
    if any(isinstance(leaf, Cache) for leaf in pytree.tree_leaves((tuple(args), dict(kwargs or {})))):
        raise TypeError(
            "Expected tensors as inputs of the graph, got a Cache. Export a function of tensors that appends "
            "the new keys itself: k = torch.cat((past_k, k), 2), v likewise, and attention(q, k, v, "
            "mask=Causal()). It is called with cache.keys and cache.values."
        )
    args, target = tuple(args), Target(opset_version, attention)
    settings = {"opset_version": opset_version, "verbose": False, **options}
    if isinstance(model, torch.export.ExportedProgram):
        if dynamic_shapes is not None:
            raise ValueError(
                "Expected no dynamic_shapes for an exported program, which has its own. Give them to "
                "torch.export.export."
            )
        if not args and not kwargs and model.example_inputs is not None:
            args, kwargs = model.example_inputs
        with _own_errors(), exported.exporting(target):
            replaced = model.run_decompositions(exported.decompositions())
            program = torch.onnx.export(replaced, dynamo=True, f=path, **settings)
        source: Callable[..., Any] = model.module()
    else:
        source = module = _as_module(model)
        _check_arguments(module, args, kwargs or {})
        _check_shapes(module, args, kwargs or {}, dynamic_shapes)
        with _own_errors(), exported.exporting(target), _names(module, target):
            program = torch.onnx.export(
                module, args, path, kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes, dynamo=True,
                **settings,
            )  # fmt: skip
        _check_dynamic(program, dynamic_shapes)
    report = Report(program, target.calls, opset_version, None, source)
    if check:
        report.difference = report.compare(*args, **(kwargs or {}))
    return report


class _Function(nn.Module):
    """A function as a module, with the function's signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _as_module(model: Any) -> nn.Module:
    """Return the model as a module in evaluation mode."""
    if isinstance(model, type) or not callable(model):
        raise TypeError(f"Expected a module, a function or an exported program, got {kind(model)}.")
    if not isinstance(model, nn.Module):
        return _Function(model).eval()
    if model.training:
        raise ValueError("Expected a model in evaluation mode, got one in training mode. Call model.eval().")
    return model


def _check_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if the model can't be called with these arguments."""
    try:
        signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"Expected example arguments of the model, got {len(args)} args and {len(kwargs)} kwargs: "
            f"{error}. Write manyheads.onnx.export(model, (x,))."
        ) from None
    except ValueError:  # a function that isn't written in Python has no signature
        pass


def _check_shapes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> None:
    """Raise an error if dynamic_shapes has a name or an axis that the arguments don't have."""
    if dynamic_shapes is None:
        return
    if isinstance(dynamic_shapes, str | bytes) or not isinstance(dynamic_shapes, Mapping | Sequence):
        raise TypeError(
            f"Expected dynamic_shapes to be a tuple with a part for each argument, or a dict by name, got "
            f'{kind(dynamic_shapes)}. Write ({{1: Dim("t")}},) for axis 1 of one argument.'
        )
    try:
        bound = signature(model.forward).bind(*args, **kwargs)
    except ValueError:  # it isn't written in Python
        return
    kinds = {bound.signature.parameters[name].kind for name in bound.arguments}
    if kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return  # PyTorch checks these
    given = bound.arguments
    if isinstance(dynamic_shapes, Mapping):
        for name in dynamic_shapes:
            if name not in given:
                raise ValueError(
                    f"Expected dynamic_shapes to have names of the given arguments, {', '.join(given)}, got "
                    f"{name!r}."
                )
        missing = [name for name in given if name not in dynamic_shapes]
    else:
        missing = list(given)[len(dynamic_shapes) :]
        if len(dynamic_shapes) > len(given):
            raise ValueError(
                f"Expected dynamic_shapes to have a part for each of the {len(given)} arguments "
                f"({', '.join(given)}), got {len(dynamic_shapes)}."
            )
        dynamic_shapes = dict(zip(given, dynamic_shapes, strict=False))
    if missing:
        raise ValueError(
            f"Expected dynamic_shapes to have a part for each of the arguments {', '.join(given)}, got none "
            f"for {', '.join(missing)}. Give {{}} or None to an argument whose sizes are constant."
        )
    for name, value in given.items():
        if isinstance(value, Tensor):
            _check_axes(name, value, dynamic_shapes[name])


def _check_axes(name: str, x: Tensor, axes: Any) -> None:
    """Raise an error unless a part of dynamic_shapes fits a tensor."""
    if axes is None:
        return
    if isinstance(axes, tuple | list):
        if len(axes) != x.dim():
            raise ValueError(
                f"Expected a part of dynamic_shapes for each of the {x.dim()} axes of {name} {sizes(x)}, got "
                f"{len(axes)}. Write a dict by axis to give some of them."
            )
        axes = dict(enumerate(axes))
    if not isinstance(axes, Mapping):
        raise TypeError(
            f'Expected dynamic_shapes of {name} to be a dict by axis, such as {{1: Dim("t")}}, got '
            f"{kind(axes)}."
        )
    for axis, size in axes.items():
        if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < x.dim():
            raise ValueError(
                f"Expected an axis of {name} {sizes(x)} in dynamic_shapes, 0 to {x.dim() - 1}, got {axis!r}."
            )
        is_known = size is None or isinstance(size, str | int | Dim | type(Dim.AUTO))
        if isinstance(size, bool) or not is_known:
            raise TypeError(
                f'Expected the size of axis {axis} of {name} in dynamic_shapes to be a Dim("t"), '
                f"Dim.DYNAMIC, Dim.AUTO, a name, or None for a constant, got {size!r}."
            )
        if isinstance(size, int) and size != x.shape[axis]:
            raise ValueError(
                f"Expected the constant size of axis {axis} of {name} in dynamic_shapes to be that of the "
                f'example, {x.shape[axis]}, got {size}. Give Dim("t") to a size that may change.'
            )


@contextmanager
def _names(model: nn.Module, target: Target) -> Iterator[None]:
    """Keep the names of the modules that are running in the target, while the model is traced."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        if module is model:
            target.calls.clear()  # the trace begins, perhaps again
        target.modules.append(names.get(module, ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        target.modules.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_dynamic(program: Any, dynamic_shapes: Any) -> None:
    """Raise ValueError if a size that should be dynamic became a constant, as PyTorch's exporter allows."""
    leaves = pytree.tree_leaves(dynamic_shapes)
    wanted = sum(isinstance(leaf, Dim | str) or leaf is Dim.DYNAMIC for leaf in leaves)
    shapes = [value.shape for value in program.model.graph.inputs if value.shape is not None]
    got = sum(not isinstance(size, int) for shape in shapes for size in shape)
    if got < wanted:
        listed = ", ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"Expected {wanted} sizes of the inputs to be dynamic, got {got} in {listed}: the model computes "
            "with a size as a constant. Find out where with torch.export.export and the same dynamic_shapes."
        )


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an error of this library as it is, and PyTorch's errors as one sentence."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while True:
            frames = [frame for frame, _ in walk_tb(cause.__traceback__)]
            if isinstance(cause, TypeError | ValueError) and _is_ours(frames[-1].f_globals["__name__"]):
                raise cause from None
            if cause.__cause__ is None:
                break
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0].strip().rstrip(".")
        hint = ""
        if "Cache" in reason:  # of a model of transformers
            hint = ' Export it without its cache: kwargs={"use_cache": False}.'
        raise ValueError(
            f"Expected a model and dynamic_shapes that PyTorch's exporter supports, got its error: "
            f"{reason}.{hint}"
        ) from error


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _need(use: str, package: str) -> None:
    """Raise ImportError if a package isn't installed."""
    if find_spec(package) is None:
        raise extras.missing(use, package, "onnx")


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number; raise ValueError if it is too large."""
    if got.shape != expected.shape:
        raise ValueError(
            f"Expected an output {list(expected.shape)} of onnxruntime, as PyTorch returns, got "
            f"{list(got.shape)}."
        )
    allowed = TOLERANCE.get(expected.dtype, 0.0)
    got, expected = got.double(), expected.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    largest = torch.where(expected.isfinite(), expected, 0.0).abs().amax() if expected.numel() else 1.0
    apart = torch.where(same, 0.0, (got - expected).abs() / max(float(largest), 1e-30))
    difference = float(apart.max()) if apart.numel() else 0.0
    if not difference <= allowed:
        raise ValueError(
            f"Expected outputs of onnxruntime within {allowed:g} of the largest number, got a difference of "
            f"{difference:.2g}. Report it with the model, or export with check=False and inspect it."
        )
    return difference
