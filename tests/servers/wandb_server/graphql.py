"""The part of GraphQL that a client's documents use: parse a document, answer it from Python objects.

Fields, aliases, arguments, variables with defaults, fragments, inline fragments, `@include` and `@skip`. An
object is a mapping from field names to values or to functions of the field's arguments. A field that an object does
not have is answered with null and named to the caller, so that a test can assert that nothing was made up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(
    r"""[\s,\ufeff]+|\#[^\n]*"""
    r"""|(?P<spread>\.\.\.)"""
    r"""|(?P<name>[_A-Za-z]\w*)"""
    r"""|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"""
    r"""|(?P<string>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<mark>[{}()\[\]:=$!@|&])"""
)

_LITERALS = {"true": True, "false": False, "null": None}


class GraphQLError(Exception):
    """A document that this server cannot answer, or an answer that is an error by intention."""


class Field:
    """One field of a selection: the key it is answered under, its name, arguments and own selection."""

    def __init__(self, key: str, name: str, args: dict[str, Any], selection: list[Any]) -> None:
        self.key, self.name, self.args, self.selection = key, name, args, selection


class Spread:
    """A fragment used by name, or written in place (then `selection` is set)."""

    def __init__(self, name: str | None, selection: list[Any] | None, directives: list[Any]) -> None:
        self.name, self.selection, self.directives = name, selection, directives


class Variable(str):
    """The name of a variable, standing where its value goes."""


class Document:
    """A parsed document: its one operation and the fragments that it uses."""

    def __init__(self, text: str) -> None:
        self.kind, self.operation = "query", ""
        self.defaults: dict[str, Any] = {}
        self.selection: list[Any] = []
        self.fragments: dict[str, list[Any]] = {}
        self._tokens = list(_tokens(text))
        self._at = 0
        while self._at < len(self._tokens):
            self._definition()

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self, expected: str | None = None) -> str:
        token = self._peek()
        if not token or (expected is not None and token != expected):
            raise GraphQLError(f"syntax error: expected {expected or 'more'}, found {token or 'the end'}")
        self._at += 1
        return token

    def _skip(self, token: str) -> bool:
        if self._peek() == token:
            self._at += 1
            return True
        return False

    def _definition(self) -> None:
        if self._skip("fragment"):
            name = self._next()
            self._next("on")
            self._next()
            self.fragments[name] = self._selection()
            return
        if self._peek() in ("query", "mutation"):
            self.kind = self._next()
            if self._peek() not in ("(", "{"):
                self.operation = self._next()
            if self._skip("("):
                while not self._skip(")"):
                    self._variable_definition()
        self.selection = self._selection()

    def _variable_definition(self) -> None:
        self._next("$")
        name = self._next()
        self._next(":")
        while self._peek() not in ("$", ")", "="):
            self._next()
        if self._skip("="):
            self.defaults[name] = self._value()

    def _selection(self) -> list[Any]:
        self._next("{")
        out: list[Any] = []
        while not self._skip("}"):
            if self._skip("..."):
                out.append(self._spread())
                continue
            key = name = self._next()
            if self._skip(":"):
                name = self._next()
            args: dict[str, Any] = {}
            if self._skip("("):
                while not self._skip(")"):
                    arg = self._next()
                    self._next(":")
                    args[arg] = self._value()
            directives = self._directives()
            selection = self._selection() if self._peek() == "{" else []
            out.append(Spread(None, [Field(key, name, args, selection)], directives))
        return out

    def _spread(self) -> Spread:
        name = None
        if self._skip("on"):
            self._next()
        elif self._peek() not in ("{", "@"):
            name = self._next()
        directives = self._directives()
        return Spread(name, None if name else self._selection(), directives)

    def _directives(self) -> list[tuple[str, Any]]:
        out = []
        while self._skip("@"):
            name = self._next()
            self._next("(")
            self._next("if")
            self._next(":")
            out.append((name, self._value()))
            self._next(")")
        return out

    def _value(self) -> Any:
        token = self._next()
        if token == "$":
            return Variable(self._next())
        if token == "[":
            items = []
            while not self._skip("]"):
                items.append(self._value())
            return items
        if token == "{":
            fields = {}
            while not self._skip("}"):
                name = self._next()
                self._next(":")
                fields[name] = self._value()
            return fields
        if token[0] == '"':
            return token[1:-1].replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
        if token in _LITERALS:
            return _LITERALS[token]
        if token[0] in "-0123456789":
            return float(token) if set(token) & set(".eE") else int(token)
        return token  # an enum's value


def execute(
    document: Document, variables: Mapping[str, Any], root: Mapping[str, Any], unknown: Callable[[str], None]
) -> dict[str, Any]:
    """The `data` of the answer; `unknown` is told each field that no object could answer, as `Type.field`."""

    values = {**document.defaults, **{k: v for k, v in variables.items() if v is not None}}

    def fill(value: Any) -> Any:
        if isinstance(value, Variable):
            return values.get(value)
        if isinstance(value, dict):
            return {k: fill(v) for k, v in value.items()}
        return [fill(v) for v in value] if isinstance(value, list) else value

    def wanted(directives: list[tuple[str, Any]]) -> bool:
        return all(bool(fill(v)) == (name == "include") for name, v in directives)

    def select(obj: Mapping[str, Any], selection: list[Any], out: dict[str, Any]) -> dict[str, Any]:
        for item in selection:
            if isinstance(item, Spread):
                if wanted(item.directives):
                    inner = document.fragments[item.name] if item.name else item.selection
                    select(obj, inner or [], out)
            else:
                out[item.key] = answer(obj, item)
        return out

    def answer(obj: Mapping[str, Any], field: Field) -> Any:
        if field.name not in obj:
            unknown(f"{obj.get('__typename', '?')}.{field.name}")
            return None
        value = obj[field.name]
        if callable(value):
            value = value(**{k: fill(v) for k, v in field.args.items()})
        return shape(value, field.selection)

    def shape(value: Any, selection: list[Any]) -> Any:
        if not selection or value is None:
            return value
        if isinstance(value, list):
            return [shape(v, selection) for v in value]
        return select(value, selection, {})

    return select(root, document.selection, {})


def _tokens(text: str) -> list[str]:
    out, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise GraphQLError(f"syntax error at {text[at : at + 20]!r}")
        at = match.end()
        if match.lastgroup:
            out.append(match.group())
    return out
