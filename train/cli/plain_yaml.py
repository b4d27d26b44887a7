"""Parse YAML that this program wrote, and refuse harmful YAML.

A few lines of aliases can stand for billions of values. Tags, loops and endlessly
nested text are refused too.
"""

from typing import Any

import yaml

_MAX_REPEATED = 1_000  # values that a file may add by aliases


def parse_yaml(text: str) -> Any:
    """Return the plain values in a text.

    Raises:
        ValueError: with the reason, if this program cannot have written the text.
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
    """Check that the last line of a file has an end: a part of YAML is often valid.

    Raises:
        ValueError: if the file is torn.
    """
    if not text.endswith("\n"):
        raise ValueError("is torn: its last line has no end")


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many values a node stands for.

    Args:
        node: a node of a parsed text; an alias is the node that it names.
        counts: the counts of earlier nodes, by id; 0 while a node is being counted.
    """
    if (count := counts.get(id(node))) is not None:
        if count == 0:
            raise ValueError("holds an alias to a value that contains it")
        return count
    counts[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    total = 1 + sum(_count(child, counts) for child in children)
    counts[id(node)] = total
    return total
