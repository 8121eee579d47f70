"""Strategies as text, read by `ast` and never by `eval`: calls of known names, and literals."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from laconic.composition import COMPOSITES, Strategy
from laconic.naming import known
from laconic.recipes import RECIPES
from laconic.recipes.registry import speaking_for

# A string; a part that has no name in texts, as `render` writes it; white space.
_PIECES = re.compile(r"""(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?P<nameless><)|(?P<space>\s+)""")


def strategy(text: str | Strategy) -> Strategy:
    """The strategy that a text describes; a strategy is passed through.

    >>> strategy("bf16(warmup=100)") == strategy("ddp(reducer=Cast('bf16'), warmup=100)")
    True
    """
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise TypeError(f"a strategy is a Strategy or a text such as 'bf16()', got {type(text).__name__}")
    line = _PIECES.sub(lambda piece: " " if piece["space"] else piece[0], text.strip())
    if any(piece["nameless"] for piece in _PIECES.finditer(line)):
        raise ValueError(
            "a part in <...> has no name by which it could be found again; define its class at the top level of a module, "
            f"or register it\n  {line}\n  {' ' * line.index('<')}^"
        )
    try:
        tree = ast.parse(line, mode="eval")
    except SyntaxError as error:
        mark = " " * ((error.offset or 1) - 1) + "^"
        raise ValueError(f"{error.msg}; write a strategy as name(key=value, ...)\n  {line}\n  {mark}") from None
    value = _Reader(line).read(tree.body)
    if not isinstance(value, Strategy):
        raise ValueError(f"{text!r} is no strategy; to average gradients by a reducer write ddp(reducer={line})")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.path: list[str] = []  # the calls and arguments that are being read
        composites = {composite.__name__: composite for composite in COMPOSITES}
        self.known: dict[str, Callable[..., object]] = {**known(), **composites, **RECIPES}

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
                return {self.read(key): self.read(value) for key, value in zip(keys, values, strict=True) if key}
            case ast.Call(func=ast.Name() as name, args=args, keywords=keywords):
                return self.call(name, args, keywords)
            case ast.Name():
                return self.call(node, [], [])
        raise self.error(node, "only names, calls and literals can stand here")

    def call(self, name: ast.Name, args: list[ast.expr], keywords: list[ast.keyword]) -> object:
        if name.id not in self.known:
            raise self.error(name, f"unknown name {name.id!r}{nearest(name.id, self.known)}")
        target = self.known[name.id]
        parameters = inspect.signature(target).parameters
        named: dict[str, Any] = {}
        for keyword in keywords:
            if keyword.arg is None or keyword.arg not in parameters:
                raise self.error(keyword, f"{name.id} has no {keyword.arg!r}{nearest(str(keyword.arg), parameters)}")
            if keyword.arg in named:
                raise self.error(keyword, f"{keyword.arg!r} is given twice")
            named[keyword.arg] = self.argument(name.id, keyword.arg, keyword.value)
        words = [*parameters, *(f"argument {n + 1}" for n in range(len(parameters), len(args)))]
        positional = [self.argument(name.id, word, arg) for word, arg in zip(words, args, strict=False)]
        try:
            with speaking_for(name.id):
                return target(*positional, **named)
        except (TypeError, ValueError) as error:
            raise self.error(name, str(error)) from None

    def argument(self, owner: str, word: str, value: ast.expr) -> object:
        """One argument of a call; what is wrong inside is said to be in it."""
        self.path.append(f"{owner}: {word}: ")
        found = self.read(value)
        self.path.pop()
        return found

    def error(self, node: ast.expr | ast.keyword, message: str) -> ValueError:
        """The message, and below it the text with the offending part marked."""
        width = max((node.end_col_offset or 0) - node.col_offset, 1)
        return ValueError(f"{''.join(self.path)}{message}\n  {self.text}\n  {' ' * node.col_offset}{'^' * width}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the name that was probably meant, or all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names) or 'none'}"
