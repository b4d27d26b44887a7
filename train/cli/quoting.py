"""Overrides of text keys that say what they seem to."""

import re


def hydra_text(key: str, value: str) -> str:
    """Give an override of a text key that Hydra's grammar cannot misread."""
    # Inside quotes Hydra reads \\ as a backslash only in front of a quote.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{escaped}"'
