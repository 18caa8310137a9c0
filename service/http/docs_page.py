"""The OpenAPI document as an HTML page, without scripts and without other hosts."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from pydantic_core import to_json

_SOURCES = {
    "application/json": "JSON",
    "multipart/form-data": "form",
    "application/octet-stream": "body",
}
_WORDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minLength", "≥ {} characters"),
    ("maxLength", "≤ {} characters"),
    ("minItems", "≥ {} items"),
    ("maxItems", "≤ {} items"),
    ("minProperties", "≥ {} entries"),
    ("maxProperties", "≤ {} entries"),
    ("pattern", "matches {}"),
)
_CODE = re.compile(r"`([^`]+)`")
_Schema = Mapping[str, Any]


class _Field(NamedTuple):
    """A parameter; query string, form and JSON may accept the same one."""

    name: str
    kind: str
    default: str
    limits: str
    text: str


def render_docs(document: dict[str, Any]) -> str:
    """Render the document as HTML; its stylesheet is a static file of the service."""
    operations = [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    contents = "".join(
        f'<li><a href="#{_anchor(path, method)}"><code><b>{method.upper()}</b> {escape(path)}'
        f"</code></a> {_prose(operation.get('summary', ''))}</li>"
        for path, method, operation in operations
    )
    sections = "".join(_operation(document, *operation) for operation in operations)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="ui/shared/icon.svg">'
        '<link rel="stylesheet" href="ui/shared/base.css">'
        '<link rel="stylesheet" href="ui/docs/page.css"></head>'
        f"<body><main><h1>{title}</h1><p>{_prose(document['info']['description'])} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"<nav><h2>Routes</h2><ul>{contents}</ul></nav>{sections}</main></body></html>"
    )


def _operation(document: _Schema, path: str, method: str, operation: _Schema) -> str:
    summary, anchor = operation.get("summary", ""), _anchor(path, method)
    text = operation.get("description", "")
    paragraphs = "".join(f"<p>{_prose(part)}</p>" for part in text.split("\n\n") if part)
    return (
        f'<section id="{anchor}"><h2><code><b>{method.upper()}</b> {escape(path)}</code> '
        f"{_prose(summary)}</h2>{paragraphs}{_parameters(document, operation)}"
        f"{_answers(operation)}{_answer_fields(document, operation)}</section>"
    )


def _parameters(document: _Schema, operation: _Schema) -> str:
    """A table with a row for each field; equal fields of several sources share a row."""
    sources: dict[_Field, list[str]] = {}
    for source, field in _sent(document, operation):
        sources.setdefault(field, []).append(source)
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(field.name)}</code></th><td>{", ".join(found)}</td>'
        f"<td>{escape(field.kind)}</td><td>{_value(field.default)}</td>"
        f"<td>{escape(field.limits)}</td><td>{_prose(field.text)}</td></tr>"
        for field, found in sources.items()
    )
    if not rows:
        return ""
    names = ("Name", "In", "Type", "Default", "Limits", "Description")
    return _table("Parameters", names, rows)


def _sent(document: _Schema, operation: _Schema) -> Iterator[tuple[str, _Field]]:
    for parameter in operation.get("parameters", ()):
        schema = _choice(document, parameter["schema"])
        text = parameter.get("description", "")
        yield (
            parameter["in"],
            _field(document, parameter["name"], schema, text, parameter.get("required", False)),
        )
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        source = _SOURCES.get(media_type, media_type)
        schema = _choice(document, content["schema"])
        if schema.get("properties"):
            for field in _inside(document, schema):
                yield source, field
        else:
            yield media_type, _field(document, "(the whole body)", schema, "", is_required=True)


def _inside(document: _Schema, schema: _Schema, before: str = "") -> Iterator[_Field]:
    """The fields of an object and of nested objects, named by their path."""
    required = schema.get("required", ())
    for name, given in schema["properties"].items():
        known = _choice(document, given)
        yield _field(
            document, f"{before}{name}", known, known.get("description", ""), name in required
        )
        inner, path = known, f"{before}{name}"
        while "items" in inner:
            inner, path = _choice(document, inner["items"]), f"{path}[]"
        if isinstance(inner.get("additionalProperties"), dict):
            inner, path = _choice(document, inner["additionalProperties"]), f"{path}.*"
        if inner.get("properties"):
            yield from _inside(document, inner, f"{path}.")


def _field(document: _Schema, name: str, schema: _Schema, text: str, is_required: bool) -> _Field:
    default = "required" if is_required else _shown(schema.get("default"))
    inner = _choice(document, schema["items"]) if "items" in schema else {}
    limits = [*_limits(schema), *(f"each {limit}" for limit in _limits(inner))]
    return _Field(name, _kind(document, schema), default, ", ".join(limits), text)


def _choice(document: _Schema, schema: _Schema) -> dict[str, Any]:
    """A schema with references resolved; for a nullable value, the schema of the value."""
    if "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _choice(document, found | others)
    choices = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(choices) != 1:
        return dict(schema)
    others = {key: value for key, value in schema.items() if key != "anyOf"}
    return _choice(document, choices[0] | others)


def _kind(document: _Schema, schema: _Schema) -> str:
    if "anyOf" in schema:
        kinds = (_kind(document, _choice(document, one)) for one in schema["anyOf"])
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " | ".join(_shown(one) for one in schema["enum"])
    if "const" in schema:
        return _shown(schema["const"])
    if "items" in schema:
        return f"list of {_kind(document, _choice(document, schema['items']))}"
    if schema.get("format") == "binary":
        return "file"
    kind = schema.get("type", "any")
    encoding = schema.get("contentEncoding")
    return f"{kind} ({encoding})" if encoding else str(kind)


def _limits(schema: _Schema) -> Iterator[str]:
    for name, words in _WORDS:
        if name in schema:
            yield words.format(schema[name])


def _answers(operation: _Schema) -> str:
    """A table of the statuses and the problems of each."""
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(status)}</code></th>'
        f"<td>{_prose(answer.get('description', ''))}</td><td>{_problems(answer)}</td></tr>"
        for status, answer in sorted(operation["responses"].items())
    )
    return _table("Answers", ("Status", "Meaning", "Problems"), rows)


def _answer_fields(document: _Schema, operation: _Schema) -> str:
    """A table of the fields of a successful answer in JSON."""
    text = ""
    for status, answer in operation["responses"].items():
        content = answer.get("content", {}).get("application/json", {}) if status < "3" else {}
        schema = _choice(document, content.get("schema", {}))
        if not schema.get("properties"):
            continue
        rows = "".join(
            f'<tr><th scope="row"><code>{escape(field.name)}</code></th>'
            f"<td>{escape(field.kind)}</td><td>{_prose(field.text)}</td></tr>"
            for field in _inside(document, schema)
        )
        text += f"<p>{_prose(schema.get('description', ''))}</p>"
        text += _table("Fields of the answer", ("Name", "Type", "Description"), rows)
    return text


def _problems(answer: _Schema) -> str:
    slugs = {
        slug
        for media_type, content in answer.get("content", {}).items()
        if "problem" in media_type
        for slug in content.get("examples", {})
    }
    return " ".join(f"<code>{escape(slug)}</code>" for slug in sorted(slugs))


def _table(caption: str, names: tuple[str, ...], rows: str) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _anchor(path: str, method: str) -> str:
    return f"{method}{re.sub('[^a-z0-9_]+', '-', path)}"


def _prose(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _value(text: str) -> str:
    return text if text in ("", "required") else f"<code>{escape(text)}</code>"


def _shown(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    return value if isinstance(value, str) else to_json(value).decode()
