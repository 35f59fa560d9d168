"""The errors that the library raises: their classes and texts, read from its raise statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import manyheads

SOURCE = Path(manyheads.__file__).parent
MOST = 6  # texts of one raise statement; a value with more alternatives is shown as ‹name›

# What users don't meet: the module, the class of the error ("" for all), and why.
INTERNAL = {
    ("trees", ""): "data between the checker's processes; `observe` and `protocol` raise their own errors",
    ("checker.isolation.protocol", ""): "data between the checker's processes",
    ("viewer.api", "LookupError"): "responses to addresses that the viewer's page never requests",
    ("viewer.pyramid", "IndexError"): "responses to addresses that the viewer's page never requests",
    ("viewer.server", "HTTPException"): "a response to an address that the viewer's page never requests",
    ("acceleration", "TypeError"): "caught: PyTorch computes the call, or raises its own error",
    ("acceleration", "ValueError"): "caught: PyTorch computes the call, or raises its own error",
    ("kernels", "AssertionError"): "can't happen: the reference kernel supports every problem",
    ("observe.summaries", "AttributeError"): "Python's protocol for missing attributes",
    ("", "AttributeError"): "Python's protocol for missing attributes",
    ("distributed", "AttributeError"): "Python's protocol for missing attributes",
}
# Classes that end a command or a process, and carry no message.
SIGNALS = {"NotImplementedError", "KeyboardInterrupt", "SystemExit", "Exit"}
# The verbs of an advice that follows a colon.
ADVICE = "if|pad|observe|use|pass|move|write|convert|wrap|compose|say|allocate|call|give|read|build"
# Reasons become part of the error of a caller: the module, the start of the reason, and the whole error.
REASONS = [
    ("storage", "its mask has", "Call ‹call› of ‹name› can't be saved: {}"),
    ("storage", "its mask is nested more than ‹…› deep. Save", "Call ‹call› of ‹name› can't be saved: {}"),
    ("storage", "its header", "‹path› isn't a safetensors file, or is truncated: {}. Save it again."),
    ("storage", "", "‹path› isn't a valid manyheads file: {} Save it again."),
    ("observe.summaries", "its tensors", "The statistics in the file can't be read: {}. Save it again."),
    ("text.models", "there is no", "‹name› has no tokenizer that can be loaded: {}. Save one beside it."),
    (
        "kernels.flex",
        "it returns",
        "kernel=\"flex\" doesn't support this: ‹rule› can't be evaluated for one pair ({}). "
        'Use kernel="auto", or a kernel that explain(...) lists as supported.',
    ),
    (
        "viewer.server",
        "it must",
        "Can't listen on port ‹port›: {}. Pass a different port, or 0 for any free one.",
    ),
]
# Errors that contain one of another library or of the caller's code: what to do.
FIXES = {
    "Correct the line that the error names: it is in the code under check.": (
        "building ‹name› raised",
        "calling ‹",
        "calling the factory",
        "importing ‹",
        "reading ‹",
    ),
    "Do what the error in it says.": ("Call ‹call› of ‹name› can't be saved: ‹error›",),
    "Save the file again: it is damaged, or another program wrote it.": (
        "Expected tensor ‹name›",
        "Expected only the bytes",
        "Expected axes of at most",
        "Expected ‹name› to have",
        "Expected lse to be ‹dtype›",
        "Expected value_norm to be torch.float32",
        "Expected every call once",
        "Expected a mask or bias to be one of",
        "Expected a name to be a string of",
        "Expected the ‹field› of",
        "Expected a whole number between",
        "‹path› isn't a valid",
    ),
}
# What follows "Expected NAME to": else "to" belongs to the description of what is expected.
VERBS = "be|have|share|divide|broadcast|match|return|take|rotate|start|support|give"


@dataclass(frozen=True)
class Raised:
    """A text of a raise statement.

    Args:
        module: The module, without "manyheads.".
        line: Its line.
        error: The name of the class.
        cause: The first sentence of the text; ‹…› stands for values.
        fix: The other sentences, or what the first one expects.
    """

    module: str
    line: int
    error: str
    cause: str
    fix: str


class Source(ast.NodeVisitor):
    """The functions, constants and raise statements of a module."""

    def __init__(self, path: Path) -> None:
        names = path.relative_to(SOURCE).with_suffix("").parts
        self.module = ".".join(names).removesuffix("__init__").removesuffix(".")
        self.functions: dict[str, ast.FunctionDef] = {}
        self.strings: dict[str, list[ast.expr]] = {}
        self.statements: list[tuple[ast.Raise, list[ast.FunctionDef]]] = []
        self._inside: list[ast.FunctionDef] = []
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note a function, and visit its statements."""
        self.functions.setdefault(node.name, node)
        self._inside.append(node)
        self.generic_visit(node)
        self._inside.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note the value of a global name."""
        for target in node.targets:
            if isinstance(target, ast.Name) and not self._inside:
                self.strings.setdefault(target.id, []).append(node.value)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Note a raise statement, unless it raises a caught exception again."""
        if node.exc is not None:
            self.statements.append((node, list(self._inside)))


@cache
def sources() -> list[Source]:
    """Return all modules."""
    return [Source(path) for path in sorted(SOURCE.rglob("*.py"))]


@cache
def errors() -> list[Raised]:
    """Return the errors that users meet, in the order of modules and lines."""
    found = {}
    for source in sources():
        for node, functions in source.statements:
            for error, text in texts_of(node, Scope(source, functions)):
                if is_internal(source.module, error):
                    continue
                cause, fix = split(complete(source.module, text))
                if error == "UnexpectedOutput":  # of the code under check
                    fix = fix.replace("Pass ", "Return ")
                found[source.module, error, cause, fix] = Raised(
                    source.module, node.lineno, error, cause, fix
                )
    return list(found.values())


def is_internal(module: str, error: str) -> bool:
    """Return True if users don't meet errors of this class from this module."""
    return error in SIGNALS or (module, error) in INTERNAL or (module, "") in INTERNAL


def complete(module: str, text: str) -> str:
    """Return the error that has a reason in it; a text that isn't a reason is returned unchanged."""
    for where, start, whole in REASONS:
        if module == where and text.startswith(start) and (start or text[:1].islower()):
            return whole.format(text)
    return text


def split(text: str) -> tuple[str, str]:
    """Split a message into its cause and its fix."""
    cause, fix = partition(" ".join(text.split()))
    if cause[-1] not in ".?›)":
        cause += "."
    given = (advice for advice, starts in FIXES.items() if cause.startswith(starts))
    return cause, fix or next(given, "") or expectation(cause)


def partition(text: str) -> tuple[str, str]:
    """Return the first sentence of a message and the rest, which may follow a colon: "…: use eager."."""
    sentence = re.search(
        r"(?:(?<!e\.g)(?<!i\.e)[.!?]\)? |‹(?:error|reason)› (?=[A-Z]))(?=[A-Za-z‹`/\"_-])", text
    )
    if sentence:
        return text[: sentence.end() - 1], text[sentence.end() :]
    advice = re.search(rf"[:;] (?=(?:{ADVICE}) )", text)
    if advice:
        return text[: advice.start()] + ".", text[advice.end()].upper() + text[advice.end() + 1 :]
    return text, ""


def expectation(cause: str) -> str:
    """Return what to do, for a sentence of the form "Expected …, got …."."""
    found = re.match(r"Expected (.+?)(?:,? but it takes .*|, got .*|\.$)", cause)
    if not found:
        return ""
    form = re.match(rf"((?:(?! to ).)+) to ({VERBS}) (.+)", found[1])
    if not form:
        return f"Pass {found[1]}."
    name, verb, rest = form.groups()
    if verb != "be":
        return f"Make {name} {verb} {rest}."
    if re.match("between|at (least|most)|below", rest):
        return f"Set {name} to a value {'of ' if rest.startswith('at') else ''}{rest}."
    if re.match("even|finite|different|positive|boolean|integers? ", rest):
        return f"Make {name} {rest}."
    return f"Pass {rest} as {name}."


@dataclass(frozen=True)
class Scope:
    """Where an expression is evaluated: its module, the functions around it, and texts of arguments."""

    source: Source
    functions: list[ast.FunctionDef]
    arguments: tuple[tuple[str, tuple[str, ...]], ...] = ()
    depth: int = 0  # of calls

    def call(self, function: ast.FunctionDef, source: Source, call: ast.Call) -> Scope:
        """Return the scope of a function that this scope calls, with the texts of its arguments."""
        names = [arg.arg for arg in function.args.args if arg.arg != "self"]
        given = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
        deeper = replace(self, depth=self.depth + 1)
        texts = [(name, tuple(templates(value, deeper))) for name, value in given if name]
        return Scope(
            source, [function], tuple((name, found) for name, found in texts if found), self.depth + 1
        )

    def find(self, name: str) -> Iterator[tuple[ast.FunctionDef, Source]]:
        """Yield the functions of a name: of this module, else of all."""
        found = [source for source in [self.source, *sources()] if name in source.functions]
        for source in found[:1]:
            yield source.functions[name], source


def texts_of(node: ast.Raise, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield the class and each text of a raise statement."""
    yield from exceptions(node.exc, scope)


def exceptions(node: ast.expr | None, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield the class and each text of an expression whose value is an exception."""
    if isinstance(node, ast.Name) and scope.depth < 4:  # a local variable
        for value in assigned(node.id, scope):
            yield from exceptions(value, replace(scope, depth=scope.depth + 1))
    if isinstance(node, ast.IfExp):
        yield from exceptions(node.body, scope)
        yield from exceptions(node.orelse, scope)
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "error_class":  # in `isolation.errors`: the kind of the error decides
        name = "CandidateError"
    elif not name[:1].isupper():  # a function that returns an exception
        for function, source in scope.find(name) if scope.depth < 4 else ():
            inner = scope.call(function, source, node)
            for statement in ast.walk(function):
                if isinstance(statement, ast.Return):
                    yield from exceptions(statement.value, inner)
        return
    for argument in node.args:
        for text in templates(argument, scope):
            if " " in text:
                yield name, text


def assigned(name: str, scope: Scope) -> list[ast.expr]:
    """Return the expressions that a function assigns to a name; else those that the modules do."""
    found: list[ast.expr] = []
    for function in reversed(scope.functions):
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        found.append(statement.value)
        if found:
            return found
    if name.isupper():
        for source in [scope.source, *sources()]:
            if name in source.strings:
                return source.strings[name]
    return []


def templates(node: ast.expr | None, scope: Scope, depth: int = 0) -> list[str]:
    """Return the texts that an expression may have, with ‹…› for values; none if it isn't a text."""
    if depth > 6 or scope.depth > 3:
        return []
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return joined([pieces(part, scope, depth) for part in parts])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = [templates(left, scope, depth + 1), templates(right, scope, depth + 1)]
            return joined(both) if all(both) else []
        case ast.IfExp(body=body, orelse=orelse):
            both = [templates(body, scope, depth + 1), templates(orelse, scope, depth + 1)]
            return [*both[0], *both[1]] if all(both) else []
        case ast.Name(id=name):
            for known, texts in scope.arguments:
                if known == name:
                    return list(texts)
            given = [value for value in assigned(name, scope) if ast.unparse(value) != "None"]
            values = [templates(value, scope, depth + 1) for value in given]
            return [text for texts in values for text in texts] if values and all(values) else []
        case ast.Call(func=ast.Name(id=name)):
            for function, source in scope.find(name):
                returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
                inner = scope.call(function, source, node)  # type: ignore[arg-type]
                texts = [templates(value, inner, depth + 1) for value in returned]
                if texts and all(texts):
                    return [text for each in texts for text in each]
    return []


def pieces(part: ast.expr, scope: Scope, depth: int) -> list[str]:
    """Return the texts of a part of an f-string."""
    if isinstance(part, ast.FormattedValue):
        is_call = isinstance(part.value, ast.Call) and ast.unparse(part.value.func) != "close_matches"
        is_text = part.format_spec is None and not is_call
        texts = templates(part.value, scope, depth + 1) if is_text else []
        texts = [text for text in texts if text] or texts[:1]  # with a hint, if there may be one
        return texts if 0 < len(texts) <= 3 else [f"‹{label(part.value)}›"]
    return [str(part.value)] if isinstance(part, ast.Constant) else []


def joined(parts: list[list[str]]) -> list[str]:
    """Return the texts of a concatenation, with the first alternatives if there are many."""
    return ["".join(each) for each in product(*parts)][:MOST]


def label(node: ast.expr) -> str:
    """Return a short name of a value."""
    if (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and ast.unparse(node.func) in ("sizes", "kind", "brief")
    ):
        return {"sizes": "shape", "kind": "type"}.get(ast.unparse(node.func)) or label(node.args[0])
    text = ast.unparse(node).rpartition(".")[2].strip("_").replace("_", " ")
    return text if text.replace(" ", "").isalnum() and len(text) < 30 and not text.isupper() else "…"


def kernel_reasons() -> Iterator[tuple[str, str]]:
    """Yield each kernel and each reason why it doesn't support a problem."""
    for source in sources():
        name = source.module.removeprefix("kernels.")
        if not source.module.startswith("kernels."):
            continue
        for function in source.functions.values():
            if not re.fullmatch("_?why(_machine|_rule)?_unsupported(_on_cuda)?", function.name):
                continue
            for node in ast.walk(function):
                found: list[ast.expr] = []
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "reasons.append":
                    found = node.args
                elif isinstance(node, ast.List):
                    found = node.elts
                for value in found:
                    for text in templates(value, Scope(source, [function])):
                        yield name, " ".join(text.split())
