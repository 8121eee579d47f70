"""Strategies as text, read by `ast` and never by `eval`: calls of known names, and literals."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from laconic.reducers.base import Reducer
from laconic.strategies.naming import PARTS, imported, is_part, known
from laconic.strategies.outer import Outer
from laconic.strategies.recipe import recipes, speaking_for
from laconic.strategies.routes import Route
from laconic.strategies.schedules import Schedule
from laconic.strategies.strategy import COMPOSITES, Advised, Averaging, Deltas, Strategy, render

# A string; a class where it is to be found; a part that has no name, as `render` writes it; white space.
_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_PLACE = r"[^\W\d][\w.]*:[^\W\d][\w.]*"
# Parts by the word in an argument's annotation; and what stands in an example of a call, by argument or by that word.
_PARTS = {kind.__name__: kind for kind in (*PARTS, *COMPOSITES)}
_EXAMPLES = {
    "legs": "((Every(16), 'world'),)",
    "optimizer": "torch.optim.adam:Adam",
    "base": "4",
    "alpha": "0.02",
    "Reducer": "TopK()",
    "Outer": "Nesterov()",
    "Schedule": "Every(16)",
    "Route": "Route(((Every(16), 'world'),))",
    "int": "100",
    "float": "0.1",
}
_PIECES = re.compile(rf"(?P<string>{_STRING})|(?P<place>{_PLACE})|(?P<nameless><)|(?P<space>\s+)")


def strategy(text: str | Strategy) -> Strategy:
    """The strategy that a text describes; a strategy is passed through.

    A text is a call such as `int8(warmup=100)`, of recipes, reducers, schedules, outer optimizers and plain values. It is read
    and never evaluated as Python. A class of your own is written `package.module:Name(...)`, and imported from there, or
    `Name(...)` once it is registered.

    Arguments:
      `text`: the text, or a strategy.

    >>> from laconic import strategy
    >>> strategy("bf16(warmup=100)") == strategy("ddp(reducer=Cast('bf16'), warmup=100)")
    True
    >>> strategy("ddp(reducer=laconic.reducers.cast:Cast('bf16'))") == strategy("bf16()")
    True
    """
    return _read(text, trusted=True)


def saved(text: str) -> Strategy:
    """The strategy of a text from a file: nobody here has named its modules, so none is imported because of it."""
    return _read(text, trusted=False)


def _read(text: str | Strategy, *, trusted: bool) -> Strategy:
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        hint = _where_it_goes(text, render(text)) if isinstance(text, PARTS) else ""
        named = getattr(text, "__name__", "")
        hint = f"; call it: {named}()" if named in recipes() or (isinstance(text, type) and is_part(text)) else hint
        raise TypeError(f"a strategy is a Strategy or a text such as 'bf16()', got {named or type(text).__name__}{hint}")
    line = _PIECES.sub(lambda piece: " " if piece["space"] else piece[0], text.strip())
    if any(piece["nameless"] for piece in _PIECES.finditer(line)):
        raise ValueError(
            "a part in <...> has no name by which it could be found again; define its class at the top level of a module, "
            f"or register it\n  {line}\n  {' ' * line.index('<')}^"
        )
    try:
        # As many characters, so that marks stay where they are: the colon of `module:Name` is no Python here.
        dotted = _PIECES.sub(lambda piece: piece[0].replace(":", ".") if piece["place"] else piece[0], line)
        tree = ast.parse(dotted, mode="eval")
    except SyntaxError as error:
        mark = " " * ((error.offset or 1) - 1) + "^"
        raise ValueError(f"{error.msg}; write a strategy as name(key=value, ...)\n  {line}\n  {mark}") from None
    except RecursionError:
        raise ValueError(f"the text is too deeply nested to be a strategy: {line:.60}...") from None
    value = _Reader(line, trusted).read(tree.body)
    if not isinstance(value, Strategy):
        raise ValueError(f"{text!r} is no strategy{_where_it_goes(value, line) or '; write one such as bf16()'}")
    return value


def _where_it_goes(value: object, text: str) -> str:
    """How to make a strategy of a part of one."""
    match value:
        case Reducer():
            return f"; to average gradients by a reducer write ddp(reducer={text})"
        case Schedule():
            return f": a schedule says when replicas are averaged; write local_sgd({text})"
        case Outer():
            return f": an outer optimizer steps by averaged deltas; write diloco(outer={text})"
        case Deltas() | Averaging() | Route() | Advised():
            return f": {type(value).__name__} is a part of one; write Strategy(reducer, route, averaging), or a recipe: bf16()"
    return ""


class _Reader:
    def __init__(self, text: str, trusted: bool) -> None:
        self.text, self.trusted = text, trusted
        self.path: list[str] = []  # the calls and arguments that are being read
        self.fits: list[tuple[type, ...]] = []  # of each of these arguments, the parts that it takes; none: unknown
        composites = {composite.__name__: composite for composite in COMPOSITES}
        self.known: dict[str, Callable[..., object]] = {**known(), **composites, **recipes()}

    def read(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = [(self.read(key), self.read(value)) for key, value in zip(keys, values, strict=True) if key]
                try:
                    return dict(pairs)
                except TypeError:
                    raise self.error(node, "the keys of a mapping must be numbers, texts or the like") from None
            case ast.Call(func=ast.Name() | ast.Attribute() as target, args=args, keywords=keywords):
                return self.call(target, args, keywords)
            case ast.Name() | ast.Attribute():
                _, named = self.named(node)
                return named if _is_optimizer(named) else self.call(node, [], [])
        raise self.error(node, "only names, calls and literals can stand here")

    def named(self, node: ast.Name | ast.Attribute) -> tuple[str, Callable[..., object]]:
        """What is called, and the name of it."""
        if isinstance(node, ast.Name):
            if node.id not in self.known:
                hint = nearest(node.id, self.suggested())
                if self.path:
                    hint += f"{' For' if hint.endswith('?') else '; for'} a class of your own write module:{node.id}()"
                raise self.error(node, f"unknown name {node.id!r}{hint}")
            return node.id, self.known[node.id]
        place = ast.get_source_segment(self.text, node) or ""
        module, _, path = place.partition(":")
        if not re.fullmatch(_PLACE, place):
            raise self.error(node, "only names, calls and literals can stand here; a class of your own is module:Name(...)")
        try:
            return path, imported(module, path, trusted=self.trusted)
        except ValueError as error:
            raise self.error(node, str(error)) from error

    def suggested(self) -> set[str]:
        """The names that make sense here: in an argument the parts that it takes, and elsewhere strategies."""
        strategies = {*recipes(), Strategy.__name__}
        if not self.path:
            return strategies
        fits = self.fits[-1]
        return {
            name
            for name, kind in self.known.items()
            if name not in strategies and (not fits or (isinstance(kind, type) and issubclass(kind, fits)))
        }

    def call(self, node: ast.Name | ast.Attribute, args: list[ast.expr], keywords: list[ast.keyword]) -> object:
        name, target = self.named(node)
        if _is_optimizer(target):
            raise self.error(node, f"{name} is an optimizer: write OuterOptimizer(module:{name}, {{'lr': 0.1}})")
        parameters = inspect.signature(target).parameters
        named: dict[str, Any] = {}
        for keyword in keywords:
            if keyword.arg is None or keyword.arg not in parameters:
                raise self.error(keyword, f"{name} has no {keyword.arg!r}{nearest(str(keyword.arg), parameters)}")
            if keyword.arg in named:
                raise self.error(keyword, f"{keyword.arg!r} is given twice")
            named[keyword.arg] = self.argument(name, parameters[keyword.arg], keyword.value)
        places = [one for one in parameters.values() if one.kind is not one.KEYWORD_ONLY]
        if len(args) > len(places):
            names = f"; write the arguments with their names, which are {', '.join(parameters)}" if parameters else ""
            raise self.error(args[len(places)], f"{name}: too many positional arguments, {len(args)}{names}")
        if twice := [one.name for one in places[: len(args)] if one.name in named]:
            raise self.error(node, f"{twice[0]!r} is given twice")
        given = {*named, *(one.name for one in places[: len(args)])}
        if missing := [one for one in parameters.values() if one.default is one.empty and one.name not in given]:
            needed = " and ".join(one.name for one in missing)
            raise self.error(node, f"{name} needs {needed}, such as {_example(name, parameters)}")
        positional = [self.argument(name, place, arg) for place, arg in zip(places, args, strict=False)]
        try:
            with speaking_for(name):
                return target(*positional, **named)
        except (TypeError, ValueError) as error:
            raise self.error(node, str(error)) from None

    def argument(self, owner: str, place: inspect.Parameter, value: ast.expr) -> object:
        """One argument of a call; what is wrong inside is said to be in it."""
        self.path.append(f"{owner}: {place.name}: ")
        self.fits.append(tuple(_PARTS[word] for word in _words(place) if word in _PARTS))
        found = self.read(value)
        self.path.pop()
        self.fits.pop()
        return found

    def error(self, node: ast.expr | ast.keyword, message: str) -> ValueError:
        """The message, and below it the text with the offending part marked."""
        text = self.text.encode()  # ast counts bytes
        start, width = len(text[: node.col_offset].decode()), len(text[node.col_offset : node.end_col_offset].decode())
        return ValueError(f"{''.join(self.path)}{message}\n  {self.text}\n  {' ' * start}{'^' * max(width, 1)}")


def _words(place: inspect.Parameter) -> list[str]:
    """The names in an argument's annotation, which may be a text."""
    annotation = place.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.findall(r"(?:\w+\.)*(\w+)", text)


def _example(name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """A call with what it needs and nothing more."""
    shown = []
    for place in parameters.values():
        if place.default is place.empty:
            value = next((_EXAMPLES[word] for word in (place.name, *_words(place)) if word in _EXAMPLES), "...")
            shown.append(f"{place.name}={value}" if place.kind is place.KEYWORD_ONLY else value)
    return f"{name}({', '.join(shown)})"


def _is_optimizer(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Optimizer)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the name that was probably meant, or all there are."""
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    close = [lowered[name] for name in difflib.get_close_matches(word.lower(), lowered, 1, 0.5)]
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names) or 'none'}"
