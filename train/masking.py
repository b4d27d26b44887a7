"""Recognise secrets, and mask them in all that is written or shown.

These are secrets:

- the value of a secret's name (`DB_PASS`, `apiKey2`, `SLACK_WEBHOOK_URL`), in a mapping
  or written as `NAME=value`, `"NAME": "value"` or `--name value`;
- a password or token in a URL, and the values of its signing parameters (`sig=`);
- text that has the form of a key (`AKIA...`, `ghp_...`, a JSON Web Token, a PEM block,
  the address of a webhook); the forms are those that public scanners know;
- what `${oc.env:NAME}` reads if NAME is a secret's name and, in output, the value of
  any environment variable with such a name.

Only what is written or shown is masked: a program uses the true values. The list of
rules is `masking_rules.py`.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import unquote

from train.masking_rules import (
    ASSIGNMENT,
    FLAG,
    FORMS,
    HEADER,
    LOCATION_SUFFIX,
    MODEL_QUALIFIERS,
    NAME_HINTS,
    NO_SECRETS,
    NO_VALUE,
    SECRET_WORD,
    STRONG_WORD,
    URL_PARAMETER,
    URL_PASSWORD,
    URL_TOKEN,
)

MASK = "***"
_FROM_ENVIRONMENT = re.compile(
    r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,\s*([^}]*?)\s*)?\}"
)
# While a text is masked, a character for private use stands for each interpolation.
_FIRST_HIDDEN = 0xF0000
_HIDDEN = re.compile("[\U000f0000-\U000ffffd]")
_MIN_LENGTH = 6  # A shorter secret may be a word: masked only if it is all of the text.
_MIN_OUTPUT_LENGTH = 8  # the same for variables that no config names

_environment_secrets: dict[str, str] = {}  # value -> "${oc.env:NAME}"
_config_secrets: set[str] = set()  # the parts of a config's texts that are masked


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is a secret."""
    words = _words(name)
    if "webhook" in words or "webhooks" in words:
        return True
    if name in NO_SECRETS or LOCATION_SUFFIX.search(name):
        return False
    return any(map(_is_secret_word, words)) and not _is_of_a_model(words)


def holds_secret(value: str) -> bool:
    """Return whether `mask` finds a secret in a text, whatever the text's name is."""
    return mask(value) != value


def mask(text: str) -> str:
    """Replace the secrets in a text by `***` or by `${oc.env:NAME}`.

    The result depends only on the text and on the variables that a config has named
    (`remember_secrets`), so records that are masked can be compared.
    """
    for secret, interpolation in _environment_secrets.items():
        if len(secret) >= _MIN_LENGTH or secret == text:
            text = text.replace(secret, interpolation)
    interpolations = list[str]()

    def hide(match: re.Match[str]) -> str:
        interpolations.append(_mask_default(match))
        return chr(_FIRST_HIDDEN + len(interpolations) - 1)

    # A rule must not mask a part of an interpolation: the rest could not be parsed.
    text = _mask_literal(_FROM_ENVIRONMENT.sub(hide, text))
    return _HIDDEN.sub(lambda match: _shown(match[0], interpolations), text)


def _mask_literal(text: str) -> str:
    """Mask a text that holds no interpolations."""
    for form, hints in FORMS:
        if any(hint in text for hint in hints):
            text = form.sub(_mask_form, text)
    if "://" in text:
        text = URL_TOKEN.sub(MASK, URL_PASSWORD.sub(rf"\1{MASK}", text))
    lower = text.lower()
    if any(hint in lower for hint in NAME_HINTS):
        text = HEADER.sub(rf"\1{MASK}", text)
        text = _mask_named(ASSIGNMENT, _mask_named(FLAG, text))
    return URL_PARAMETER.sub(_mask_parameter, text) if "=" in text else text


def _shown(character: str, interpolations: list[str]) -> str:
    """Return the interpolation for which a character stands, or the character."""
    index = ord(character) - _FIRST_HIDDEN
    return interpolations[index] if index < len(interpolations) else character


def mask_output(text: str) -> str:
    """Mask a text that is shown or logged.

    Masked are also the values of secret variables, and the secrets of this process's
    config wherever they stand: a library may repeat a part of a URL.
    """
    for name, value in os.environ.items():
        is_shown = len(value) >= _MIN_OUTPUT_LENGTH and value in text
        is_plain = value.isdecimal() or value.startswith(("/", "~", "."))
        if is_shown and not is_plain and is_secret_name(name):
            text = text.replace(value, f"${{oc.env:{name}}}")
    text = mask(text)
    # After the rules, which may need their context; one may be a part of another.
    for secret in sorted(_config_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def mask_values(value: Any, in_secret: bool = False) -> Any:
    """Mask nested plain values: secrets in strings, and strings under secret keys.

    With `in_secret`, every string is masked, because the name of the value is a
    secret's name.
    """
    if isinstance(value, str):
        return MASK if in_secret and value else mask(value)
    if isinstance(value, list | tuple):
        return [mask_values(item, in_secret) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        mask(key) if isinstance(key, str) else key: item
        if key == "secrets"  # Its values are only names in a secret store.
        else _mask_item(str(key), item, in_secret)
        for key, item in value.items()
    }


def mask_texts(value: Any) -> Any:
    """Mask the strings in nested plain values, whatever their names are.

    Use it for records of what happened: errors, events, results.
    """
    if isinstance(value, str):
        return mask_output(value)
    if isinstance(value, Mapping):
        return {key: mask_texts(item) for key, item in value.items()}
    return [*map(mask_texts, value)] if isinstance(value, list | tuple) else value


def remember_secrets(text: str) -> None:
    """Let `mask` hide the secrets that a text reads from environment variables."""
    for name, default in _FROM_ENVIRONMENT.findall(text):
        value = os.environ.get(name, "" if default == "null" else default)
        if value and is_secret_name(name):
            _environment_secrets[value] = f"${{oc.env:{name}}}"


def remember_config(values: Any) -> None:
    """Let `mask_output` hide the secrets in the strings of nested plain values."""
    if isinstance(values, Mapping):
        values = [*values.values()]
    if isinstance(values, list | tuple):
        for value in values:
            remember_config(value)
    if isinstance(values, str):
        secrets = _masked_parts(values)
        _config_secrets.update(s for s in secrets if len(s) >= _MIN_LENGTH)


class MaskedStream:
    """A text stream that masks what is written to it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a masked text; return the length of the text."""
        masked = mask_output(text)
        try:
            self._stream.write(masked)
        except UnicodeEncodeError:  # in this locale, or a name that is not UTF-8
            encoding = self._stream.encoding
            self._stream.write(
                masked.encode(encoding, "backslashreplace").decode(encoding)
            )
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write masked lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return everything else of the stream itself."""
        return getattr(self._stream, name)


def mask_streams() -> None:
    """Mask all that this process prints, tracebacks included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, MaskedStream(stream))


def _masked_parts(text: str) -> Iterator[str]:
    """Yield the parts of a text in whose place `mask` writes `***`."""
    first, *others = mask(text).split(MASK)
    if not text.startswith(first):
        return
    start = len(first)
    for kept in others:
        end = text.find(kept, start) if kept else len(text)
        if end < 0:  # the text before it was masked in another way
            return
        yield text[start:end]
        start = end + len(kept)


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case: `apiKey2` has `api` and `key`."""
    parts = re.split(r"[^A-Za-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    words = [part.lower() for part in parts if part]
    return (
        [*words, "connectionstring"] if "connection_string" in name.lower() else words
    )


def _is_secret_word(word: str) -> bool:
    return SECRET_WORD.fullmatch(word) is not None


def _is_of_a_model(words: list[str]) -> bool:
    """Return whether a name speaks of a model's tokens or keys: `bos_token`."""
    secret_words = {word for word in words if _is_secret_word(word)}
    return any(
        secret_words <= {word, f"{word}s"} and qualifiers.intersection(words)
        for word, qualifiers in MODEL_QUALIFIERS.items()
    )


def _mask_item(key: str, value: Any, in_secret: bool) -> Any:
    in_secret = in_secret or is_secret_name(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if in_secret and STRONG_WORD.search(key) else value
    return mask_values(value, in_secret)


def _mask_form(match: re.Match[str]) -> str:
    """Keep the part of a form that says what it was, such as `https://hooks...`."""
    kept = next((group for group in match.groups() if group is not None), "")
    return kept + MASK


def _mask_named(pattern: re.Pattern[str], text: str) -> str:
    """Mask the values of `name=value` whose name is a secret's."""
    parts = []
    position = 0
    while match := pattern.search(text, position):
        name = match["name"]
        value = match["value"]
        # One word alone may be prose: `unknown key: ...`, `key=value`.
        is_clear = len(_words(name)) > 1 or bool(STRONG_WORD.search(name))
        is_value = not NO_VALUE.fullmatch(value)
        # gcloud, sky and docker take the name of a secret as `--secret name`.
        is_reference = text[: match.end("name")].endswith("--secret")
        is_secret = is_clear and is_value and is_secret_name(name) and not is_reference
        # The value of another name may hold a secret: `ValueError: PASSWORD=...`.
        end = match.start("value") if is_secret else match.end("name")
        parts += [text[position:end], MASK * is_secret]
        position = match.end("value") if is_secret else end
    return "".join([*parts, text[position:]])


def _mask_parameter(match: re.Match[str]) -> str:
    name = unquote(match["name"])
    is_secret = is_secret_name(name) or re.search(
        r"signature|credential|(^|[-_])sig$|^code$|token", name, re.IGNORECASE
    )
    if not is_secret or NO_VALUE.fullmatch(match["value"]):
        return match[0]
    return f"{match['before']}{match['name']}={MASK}"


def _mask_default(match: re.Match[str]) -> str:
    """Mask the default that `${oc.env:API_KEY,default}` states."""
    name = match[1]
    default = match[2]
    if not default or default == MASK or not is_secret_name(name):
        return match[0]
    return f"${{oc.env:{name},{MASK}}}" if default != "null" else match[0]
