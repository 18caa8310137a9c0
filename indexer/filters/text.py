"""Filters as text: `colour = "red" and (price < 20 or not brand in ("a", "b"))`."""

import functools
import re
from typing import cast, overload

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from kinlens.embedder.errors import FilterError
from kinlens.indexer.filters.tree import (
    LIMITS,
    And,
    Equals,
    Exists,
    Filter,
    In,
    Not,
    Or,
    Range,
    StartsWith,
    located,
)
from kinlens.values import Scalar

MAX_TEXT = 200_000
_GRAMMAR = r"""
?start: disjunction
?disjunction: conjunction ("or" conjunction)*
?conjunction: negation ("and" negation)*
?negation: "not" negation -> negated
    | "(" disjunction ")"
    | condition
?condition: name OP value -> compared
    | value OP name -> flipped
    | value OP name OP value -> between
    | name "in" "(" value ("," value)* ")" -> among
    | name "not" "in" "(" value ("," value)* ")" -> not_among
    | name "exists" -> present
    | name "starts" "with" value -> beginning
name: BARE | QUOTED
value: TEXT -> text
    | NUMBER -> number
    | "true" -> yes
    | "false" -> no
OP: "==" | "=" | "!=" | "<=" | "<" | ">=" | ">"
BARE: /[A-Za-z_][\w.-]*/
QUOTED: /`([^`]|``)+`/
TEXT: /"([^"\\]|\\["'\\nrt])*"/ | /'([^'\\]|\\["'\\nrt])*'/
NUMBER: /[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?/
%ignore /\s+/
"""
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_WHOLE = re.compile(r"[+-]?\d+")
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_VALUE = 'a value such as "red" or 12.5'
_WORDS = {
    "BARE": "an attribute",
    "QUOTED": "an attribute",
    "TEXT": _VALUE,
    "NUMBER": _VALUE,
    "TRUE": _VALUE,
    "FALSE": _VALUE,
    "OP": "a comparison such as =",
    "IN": "'in'",
    "EXISTS": "'exists'",
    "STARTS": "'starts with'",
    "WITH": "'with'",
    "NOT": "'not'",
    "AND": "'and'",
    "OR": "'or'",
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "$END": "the end",
}
_SNIPPET = 40


Where = Filter | str
"""A filter, or its text."""


@overload
def as_filter(where: Where) -> Filter: ...
@overload
def as_filter(where: Where | None) -> Filter | None: ...
def as_filter(where: Where | None) -> Filter | None:
    """A filter as it is, and the filter that a text is. Raises: FilterError."""
    if where is None or isinstance(where, Filter):
        return where
    if isinstance(where, str):
        return parse_filter(where)
    raise FilterError(
        f"where = {where!r:.80} must be a text such as 'price < 20', or a filter (got "
        f"{type(where).__name__})."
    )


def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Comparisons: = == != < <= > >= in, not in, 5 <= name <= 9, name exists, name starts with "A".
    Values: quoted texts, numbers, true, false. A name with other characters than letters, digits
    and _ . - must be in backquotes.

    Raises: FilterError with the position and the expected token.
    """
    if len(text) > MAX_TEXT:
        raise FilterError(
            f"The filter has {len(text):,} characters, the limit is {MAX_TEXT:,}. Give it as JSON."
        )
    try:
        return cast(Filter, _parser().parse(text))
    except UnexpectedInput as error:
        raise FilterError(_explained(text, error)) from error


@v_args(inline=True)
class _Builder(Transformer[Token, Filter]):
    """Called by the parser for each rule, so that nested filters do not recurse."""

    def disjunction(self, *parts: Filter) -> Filter:
        return Or(parts)

    def conjunction(self, *parts: Filter) -> Filter:
        return And(parts)

    def negated(self, part: Filter) -> Filter:
        return Not(part)

    def compared(self, name: Token, sign: Token, value: Scalar) -> Filter:
        return located(f"position {name.start_pos}", lambda: _comparison(name.value, sign, value))

    def flipped(self, value: Scalar, sign: Token, name: Token) -> Filter:
        return located(
            f"position {name.start_pos}",
            lambda: _comparison(name.value, _FLIPPED.get(sign, sign), value),
        )

    def between(
        self, first: Scalar, left: Token, name: Token, right: Token, second: Scalar
    ) -> Filter:
        if left[0] != right[0] or left[0] not in "<>":
            raise FilterError(
                f"{left} and {right} at position {left.start_pos} are not a range. Write "
                "5 <= name <= 9, or join two comparisons by and."
            )
        limits = {LIMITS[_FLIPPED[left]]: first, LIMITS[right]: second}
        return located(f"position {name.start_pos}", lambda: Range(name.value, **limits))

    def among(self, name: Token, *values: Scalar) -> Filter:
        return located(f"position {name.start_pos}", lambda: In(name.value, values))

    def present(self, name: Token) -> Filter:
        return located(f"position {name.start_pos}", lambda: Exists(name.value))

    def beginning(self, name: Token, start: Scalar) -> Filter:
        return located(
            f"position {name.start_pos}", lambda: StartsWith(name.value, cast(str, start))
        )

    def not_among(self, name: Token, *values: Scalar) -> Filter:
        return Not(self.among(name, *values))

    def name(self, token: Token) -> Token:
        if token.type == "BARE":
            return token
        return token.update(value=token[1:-1].replace("``", "`"))

    def text(self, token: Token) -> str:
        return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), token[1:-1])

    def number(self, token: Token) -> Scalar:
        # Python refuses integers of thousands of digits; with 40 digits they exceed 64 bits anyway.
        return int(token[:40]) if _WHOLE.fullmatch(token) else float(token)

    def yes(self) -> bool:
        return True

    def no(self) -> bool:
        return False


def _comparison(name: str, sign: str, value: Scalar) -> Filter:
    if sign in LIMITS:
        return Range(name, **{LIMITS[sign]: value})
    equals = Equals(name, value)
    return Not(equals) if sign == "!=" else equals


@functools.cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", transformer=_Builder(), maybe_placeholders=False)


def _explained(text: str, error: UnexpectedInput) -> str:
    position = len(text)
    names: set[str] = set()
    if isinstance(error, UnexpectedCharacters):
        position, names = cast(int, error.pos_in_stream), set(error.allowed or ())
    elif isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected)
        position = len(text) if error.token.type == "$END" else error.token.start_pos or 0
    expected = sorted({_WORDS.get(name, name) for name in names - {"__IGNORE_0"}})
    near = text[position : position + _SNIPPET]
    found = f"found {near!r}" if near else "it ends"
    return (
        f"The filter cannot be parsed: {found} at position {position}. "
        f"Expected {' or '.join(expected)}."
    )
