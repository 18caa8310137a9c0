"""Changes of attributes as commands take them: price=12.5, or sizes:text[]=S|M."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.entries import DATE, Schema, parse_value
from kinlens.indexer.ingest.tables import Typed, split_kind
from kinlens.values import AttributeValue, Scalar


def assigned(
    assign: Sequence[str], unset: Sequence[str], schema: Schema
) -> dict[str, AttributeValue | None]:
    """The new values of --set; None for --unset. Raises: InvalidParameterError."""
    values: dict[str, AttributeValue | None] = dict.fromkeys(unset)
    for text in assign:
        name, value = assignment("--set", text, schema)
        if name in values:
            raise InvalidParameterError(
                f"--set {text}: {name} occurs twice in --set and --unset. Name it once."
            )
        values[name] = value
    return values


def assignment(option: str, text: str, schema: Schema) -> tuple[str, AttributeValue]:
    """The name and the value of NAME=VALUE, which `option` has. Raises: InvalidParameterError."""
    typed, equals, value = text.partition("=")
    if not equals:
        raise InvalidParameterError(
            f"{option} {text}: there is no '='. Write {option} {text}=VALUE, or --unset {text} to "
            "remove the value."
        )
    if typed.strip() in schema:
        name, found = typed.strip(), Typed(schema[typed.strip()])
    else:
        try:
            name, found = split_kind(typed)
        except ValueError as error:
            raise InvalidParameterError(f"{option} {text}: {error}=value.") from error
    if not name:
        raise InvalidParameterError(
            f"{option} {text}: there is no name before the '='. Write {option} "
            f"NAME={value or 'VALUE'}."
        )
    try:
        return name, found._replace(kind=found.kind or schema.get(name, "text")).value_of(value)
    except ValueError as error:
        kind = DATE if found.is_date else found.kind or schema.get(name)
        is_empty = not value.strip() and name in schema
        cure = "" if not is_empty else f" To remove the value, write --unset {name}."
        raise InvalidParameterError(
            f"{option} {text}: {name} is a {kind} and cannot be {value!r}: {error}.{cure}"
        ) from error


def _is_number(text: str) -> bool:
    try:
        parse_value(text, "number")
    except ValueError:
        return False
    return True


def label_of(text: str, schema: Schema) -> tuple[str, Scalar]:
    """The attribute and the value of --attribute NAME=VALUE. Raises: InvalidParameterError."""
    name, equals, _ = text.partition("=")
    if not equals or name.strip() not in schema:
        raise InvalidParameterError(
            f"--attribute {text}: expected NAME=VALUE with one of the attributes "
            f"{', '.join(schema) or '(the gallery has none)'}."
        )
    # No list, as the name has no type behind it.
    return cast(tuple[str, Scalar], assignment("--attribute", text, schema))


def hints(
    values: Mapping[str, AttributeValue | None], assign: Sequence[str] | None, schema: Schema
) -> Iterator[str]:
    """What was done may not be what was meant: unknown names, and empty texts or numbers as texts
    in what was changed by `assign`.
    """
    for name, value in values.items():
        if value is None and name not in schema:
            known = ", ".join(schema) or "none"
            yield f"--unset {name}: the gallery has no such attribute; it has {known}."
        if value == "":
            yield f"{name} is an empty text. To remove it, write --unset {name}"
    for text in assign or ():
        name, _, written = text.partition("=")
        if name in values and name not in schema and _is_number(written):
            yield f"{name} is new and is a text; for numbers write {name}:number={written}"
