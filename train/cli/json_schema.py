"""Describe the keys of a command as a JSON Schema, for editors and programs.

pydantic makes it from the dataclass that also checks values. Rules between keys are
not in it.
"""

import inspect
import json
from dataclasses import is_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from train.cli.hints import meaning_of


def json_schema_text(schema: type) -> str:
    """Return the JSON Schema (draft 2020-12) of all keys of a dataclass."""
    values = TypeAdapter(schema).json_schema(schema_generator=_Generator)
    return json.dumps({"$schema": _Generator.schema_dialect, **values}, indent=1)


class _Generator(GenerateJsonSchema):
    """Adds to the schemas of pydantic (2.11 to 2.14) the meaning of each key."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
        """Return the schema of a section, which takes no other keys."""
        kind = schema["cls"]
        section = super().dataclass_schema(schema)
        section["description"] = inspect.cleandoc(kind.__doc__ or "")
        section["additionalProperties"] = False
        for name, values in section["properties"].items():
            if meaning := meaning_of(kind, name):
                values["description"] = meaning
        return section

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        """Return the default of a key. Sections have none, but each of their keys."""
        factory: Any = schema.get("default_factory")
        if factory is not None and not is_dataclass(factory):
            schema = {**schema, "default": factory()}
        return super().get_default_value(schema)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False, because a title would only repeat the key."""
        return False
