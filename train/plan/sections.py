"""Split a step into sections, which a device executes one after another.

The loops over layers, forward and backward, are a section each. The loss is the third
section, and everything else is the fourth. The microbatches of a step are added up. The
loops over a pipeline's stages count as loops over layers, so a device's iterations are
added up, idle ones included.
"""

import re

OTHERS = "embedding and update"
SECTIONS = ("layers forward", "loss", "layers backward", OTHERS)
ENCLOSING = ("microbatches", "stages")  # These scopes contain scopes of layers.
_SCOPES = ("layers", "loss", "optimizer", *ENCLOSING)
_SCOPE = re.compile(rf"[/(](transpose\()?(jvp\()?({'|'.join(_SCOPES)})(?=[/)]|$)")


def scope_in_name(name: str) -> str:
    """Return the innermost scope in an operation's name: "layers backward", or "".

    In a pipeline only the scope of the stages states the direction.
    """
    matches = _SCOPE.findall(name)
    if not matches:
        return ""
    transposed, differentiated, scopes = zip(*matches, strict=True)
    direction = " forward" if any(differentiated) else ""
    return scopes[-1] + (" backward" if any(transposed) else direction)


def section_of(scope: str) -> str:
    """Return the section of a scope that is formatted as by `scope_in_name`."""
    name, _, direction = scope.partition(" ")
    if name in ("layers", "stages"):
        return f"layers {direction or 'forward'}"
    return "loss" if name == "loss" else OTHERS


def outermost_part(scope: str) -> str:
    """Return the outermost part of the model in a scope (model/scopes.py), or ""."""
    match = re.search(r"[/(]part\.(\w+)", f"/{scope}")
    return match[1] if match else ""
