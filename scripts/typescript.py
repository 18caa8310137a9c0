"""TypeScript types of the HTTP API, from its OpenAPI document. The site publishes `kinlens.d.ts`.

    python scripts/typescript.py tests/golden/openapi.json > kinlens.d.ts

`Operations` has one entry for each route, such as "POST /search", with its path parameters, query,
bodies by media type and answer; each schema of the document is a type of the same name. Limits and
patterns are not types: the service checks them.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
PRIMITIVES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "Record<string, unknown>",
}
HEAD = """\
// Types of the HTTP API of Kinlens {version}, made from its OpenAPI document. No code is generated:
//   const body: Operations["POST /search"]["body"]["application/json"] = {{ ... }};
"""


def declarations(document: dict[str, Any]) -> str:
    """The whole file."""
    parts = [HEAD.format(version=document["info"]["version"])]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"{comment(schema)}export type {name} = {type_of(schema)};\n")
    parts.append(f"export interface Operations {{\n{''.join(operations(document))}}}\n")
    return "\n".join(parts)


def operations(document: dict[str, Any]) -> Iterator[str]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            found = operation.get("parameters", ())
            fields = {
                "path": parameters([each for each in found if each["in"] == "path"]),
                "query": parameters([each for each in found if each["in"] == "query"]),
                "body": bodies(operation.get("requestBody", {}).get("content", {})),
                "answer": answer(operation["responses"]),
            }
            lines = "".join(
                f"    {name}: {text};\n".replace("\n", "\n    ").rstrip(" ")
                for name, text in fields.items()
                if text
            )
            note = comment({"description": operation.get("summary", "")}, "  ")
            yield f"{note}  {json.dumps(f'{method.upper()} {path}')}: {{\n{lines}  }};\n"


def parameters(listed: list[dict[str, Any]]) -> str:
    """The type of an object with these parameters; nothing without any."""
    properties = {each["name"]: each["schema"] for each in listed}
    required = [each["name"] for each in listed if each.get("required")]
    return object_of({"properties": properties, "required": required}) if listed else ""


def bodies(content: dict[str, Any]) -> str:
    """Types by media type. A form is sent as FormData, whose fields TypeScript does not check."""
    if not content:
        return ""
    forms = ("multipart/form-data", "application/octet-stream", "image/*")
    kinds = {
        kind: {forms[0]: "FormData"}.get(kind, "Blob")
        if kind in forms
        else type_of(media["schema"])
        for kind, media in content.items()
    }
    return "{ " + "; ".join(f"{json.dumps(kind)}: {text}" for kind, text in kinds.items()) + " }"


def answer(responses: dict[str, Any]) -> str:
    """The type of an answer with status 2xx: JSON, a text, an image, or nothing."""
    [success] = [each for status, each in responses.items() if status.startswith("2")]
    kinds = [
        type_of(media["schema"]) if "json" in kind else "string" if kind == "text/csv" else "Blob"
        for kind, media in success.get("content", {}).items()
    ]
    return " | ".join(kinds) or "void"


def type_of(schema: Schema) -> str:
    """The type of a schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"]))
    if "prefixItems" in schema:
        return f"[{', '.join(type_of(each) for each in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"Array<{type_of(schema.get('items', {}))}>"
    if "properties" in schema:
        return object_of(schema)
    if isinstance(schema.get("additionalProperties"), dict):
        return f"Record<string, {type_of(schema['additionalProperties'])}>"
    # A kind of schema that is not known fails here and not in the program of a user.
    return PRIMITIVES[schema["type"]] if schema.keys() - {"title", "description"} else "unknown"


def object_of(schema: Schema) -> str:
    required = schema.get("required", ())
    lines = [
        f"{comment(each)}{name if re.fullmatch('[A-Za-z_]+', name) else json.dumps(name)}"
        f"{'' if name in required else '?'}: {type_of(each)};"
        for name, each in schema["properties"].items()
    ]
    return "{\n" + "\n".join(f"  {line}" for text in lines for line in text.split("\n")) + "\n}"


def comment(schema: Schema, indent: str = "") -> str:
    """The description as a comment; nothing without one."""
    text = " ".join(schema.get("description", "").replace("*/", "* /").split())
    mark = "@deprecated " if schema.get("deprecated") else ""
    return f"{indent}/** {mark}{text} */\n" if text or mark else ""


if __name__ == "__main__":
    sys.stdout.write(declarations(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
