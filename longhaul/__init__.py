"""Longhaul: pretraining of GPT-style language models with JAX.

Programs can use ten names. Each is imported on its first use, so that `import longhaul`
takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longhaul import errors
    from longhaul.api import (
        batches,
        compose,
        evaluate,
        load_run,
        make_program,
        plan,
        sample,
    )
    from longhaul.catalog import CATALOG
    from longhaul.commands import main

__all__ = ["CATALOG", "batches", "compose", "errors", "evaluate", "load_run", "main"]
__all__ += ["make_program", "plan", "sample"]
_MODULES = {"CATALOG": "longhaul.catalog", "main": "longhaul.commands"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name == "errors":
        return importlib.import_module("longhaul.errors")
    return getattr(importlib.import_module(_MODULES.get(name, "longhaul.api")), name)
