"""The API's schema, and a page of it that needs nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse

from inferq.producer.gateway.answers.answer_shapes import ANSWERS, SHAPES

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def schema_file(request: Request) -> JSONResponse:
    """Return the OpenAPI schema."""
    return JSONResponse(schema_of(request.app))


@router.get("/docs")
async def schema_page(request: Request) -> HTMLResponse:
    """Show the schema to people, without a script."""
    return HTMLResponse(
        _page(schema_of(request.app)),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


def schema_of(app: FastAPI) -> dict[str, Any]:
    """Return the application's schema: bodies as components, errors in OpenAI's shape."""
    if app.openapi_schema is None:
        app.openapi_schema = _adapted(app.openapi())
    return app.openapi_schema


def _adapted(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _ERROR, **SHAPES}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _adapt(operation, schemas)
            if (method, path) in ANSWERS:
                operation["responses"]["200"]["content"] = ANSWERS[method, path].content()
    return schema


def _adapt(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)  # what FastAPI says; ours are 400
    if operation.get("tags") != ["health"]:
        operation["security"] = [{"key": []}]
        operation["responses"]["default"] = {
            "description": "An error",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    content = operation.get("requestBody", {}).get("content", {})
    for form in content.values():
        body = form["schema"]
        schemas.update(body.pop("$defs", {}))
        if "title" in body:
            schemas[body["title"]] = body
            form["schema"] = {"$ref": f"#/components/schemas/{body['title']}"}


_ERROR: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _page(schema: dict[str, Any]) -> str:
    sections = []
    for path, operations in sorted(schema["paths"].items()):
        for method, operation in operations.items():
            sections.append(_section(path, method.upper(), operation, schema))
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{escape(schema['info'].get('summary', ''))} "
        f'The schema itself: <a href="openapi.json">openapi.json</a>.</p>{"".join(sections)}</html>'
    )


def _section(path: str, method: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    head = f"<h2>{method} {escape(path)}</h2><p>{escape(operation.get('summary', ''))}</p>"
    rows = [
        _row(f"{each['name']} ({each['in']})", each["schema"], is_required=each.get("required"))
        for each in operation.get("parameters", ())
    ]
    for form in operation.get("requestBody", {}).get("content", {}).values():
        name = form["schema"].get("$ref", "").rpartition("/")[2]
        body = schema["components"]["schemas"].get(name, form["schema"])
        required = body.get("required", ())
        rows += [
            _row(field, shape, is_required=field in required)
            for field, shape in body.get("properties", {}).items()
        ]
    return f"<section>{head}<table>{''.join(rows)}</table></section>"


def _row(name: str, shape: dict[str, Any], *, is_required: bool | None) -> str:
    mark = "<b>required</b> " if is_required else ""
    about = escape(shape.get("description", ""))
    default = f" Default: {escape(str(shape['default']))}." if shape.get("default") else ""
    return (
        f"<tr><td><code>{escape(name)}</code><td><code>{escape(_type(shape))}</code>"
        f"<td>{mark}{about}{default}"
    )


def _type(shape: dict[str, Any]) -> str:
    """Return a schema's type as people write it."""
    if "$ref" in shape:
        return str(shape["$ref"]).rpartition("/")[2]
    if "anyOf" in shape:
        return " | ".join(dict.fromkeys(map(_type, shape["anyOf"])))
    if "enum" in shape:
        return " | ".join(map(repr, shape["enum"]))
    if "const" in shape:
        return repr(shape["const"])
    if shape.get("type") == "array":
        return f"[{_type(shape.get('items', {}))}]"
    return str(shape.get("type", "any"))


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font: 600 1rem ui-monospace, monospace; margin: 2rem 0 0 }
td { padding: .2rem .8rem .2rem 0; vertical-align: top }
"""
