"""Parse YAML that this program wrote, and refuse harmful YAML.

A few lines of aliases can expand to billions of values, so their expansion is limited.
Tags, cycles and deeply nested text are refused too.
"""

from typing import Any

import yaml

_MAX_REPEATED = 1_000  # the maximum number of values that aliases add


def parse_yaml(text: str) -> Any:
    """Return the plain values in a YAML text.

    Raises:
        ValueError: with the reason, if this program cannot have written the text.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ValueError("is empty")
        sizes = dict[int, int]()
        if _expanded_size(node, sizes) > len(sizes) + _MAX_REPEATED:
            raise ValueError(f"adds more than {_MAX_REPEATED:,} values by its aliases")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def check_complete(text: str) -> None:
    """Check that a file's last line is complete, because truncated YAML may be valid.

    Raises:
        ValueError: if the file is truncated.
    """
    if not text.endswith("\n"):
        raise ValueError("is torn: its last line has no end")


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values in a node after its aliases are expanded.

    Args:
        node: a node of a parsed text; an alias is the same object as its anchor.
        sizes: the sizes of nodes so far, by id; 0 while a node is being counted.
    """
    if (size := sizes.get(id(node))) is not None:
        if size == 0:
            raise ValueError("holds an alias to a value that contains it")
        return size
    sizes[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    size = 1 + sum(_expanded_size(child, sizes) for child in children)
    sizes[id(node)] = size
    return size
