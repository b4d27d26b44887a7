"""Parse YAML that this program wrote, without the ways in which YAML can do harm.

A few lines of aliases can stand for billions of values. Tags, loops and text that is
nested without end are refused too.
"""

from typing import Any

import yaml

_MAX_REPEATED = 1_000  # values that a file may add by aliases


def parse_yaml(text: str) -> Any:
    """Return what a text holds, as plain values.

    Raises:
        ValueError: saying why the text is not YAML that this program wrote.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ValueError("is empty")
        counts = dict[int, int]()
        if _count(node, counts) > len(counts) + _MAX_REPEATED:
            raise ValueError(f"adds more than {_MAX_REPEATED:,} values by its aliases")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def check_whole(text: str) -> None:
    """Check that the last line of a file has an end: a part of YAML is often YAML too.

    Raises:
        ValueError: if the file is torn.
    """
    if not text.endswith("\n"):
        raise ValueError("is torn: its last line has no end")


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many values a node stands for.

    Args:
        node: of a parsed text; an alias is the node that it names.
        counts: of the nodes that were counted before; 0 while a node is counted.
    """
    if (counted := counts.get(id(node))) is not None:
        if counted == 0:
            raise ValueError("holds an alias to a value that contains it")
        return counted
    counts[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    total = 1 + sum(_count(child, counts) for child in children)
    counts[id(node)] = total
    return total
