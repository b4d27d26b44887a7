"""Recognise secrets, and mask them in all that is written or shown.

A secret is a value with a secret's name (`DB_PASS`, `API_KEY_2`, `MYTOKENS`), a
password or token in a URL, or what `${oc.env:NAME}` reads if NAME is a secret's name.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_WORD = re.compile(
    r"""(\w*(token|secret|password|passwd|passphrase|credential|apikey|accesskey)s?
        |keys?|pass|dbpass|pwd|pat|auth|authorization)""",
    re.IGNORECASE | re.VERBOSE,
)
_LOCATION_SUFFIX = re.compile(r"_(file|path|dir|url|uri|host)$", re.IGNORECASE)
# Every shell sets the first two to folders. The others are keys of the config.
_NO_SECRETS = ("PWD", "OLDPWD", "token_shift", "from_tokens", "base_batch_tokens")
_URL_PASSWORD = re.compile(r"""([A-Za-z][\w+.-]*://[^\s/:@?#]*:)([^\s/"']+)(?=@)""")
_URL_TOKEN = re.compile(r"(?<=://)[^\s/:@?#]{8,}(?=@)")  # https://<token>@host
_URL_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^\s&#]+)")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_MIN_LENGTH = 6  # A shorter secret may be a word: masked only if it is all of the text.

_environment_secrets: dict[str, str] = {}  # value -> "${oc.env:NAME}"


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is a secret."""
    if name in _NO_SECRETS or _LOCATION_SUFFIX.search(name):
        return False
    words = re.split(r"[^A-Za-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def holds_secret(value: str) -> bool:
    """Return whether `mask` finds a secret in a text, whatever the text's name is."""
    return mask(value) != value


def mask(text: str) -> str:
    """Replace the secrets in a text by `***` or by `${oc.env:NAME}`."""
    for secret, interpolation in _environment_secrets.items():
        if len(secret) >= _MIN_LENGTH or secret == text:
            text = text.replace(secret, interpolation)
    if "://" not in text:
        return text
    text = _URL_TOKEN.sub(MASK, _URL_PASSWORD.sub(rf"\1{MASK}", text))
    return _URL_QUERY.sub(
        lambda match: (
            f"{match[1]}={MASK}"
            if is_secret_name(match[1]) or "signature" in match[1].lower()
            else match[0]
        ),
        text,
    )


def mask_values(value: Any) -> Any:
    """Mask nested plain values: secrets in strings, and strings under secret keys."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list | tuple):
        return [mask_values(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: item
        if key == "secrets"  # Its values are only names in a secret store.
        else MASK
        if isinstance(item, str) and item and is_secret_name(str(key))
        else mask_values(item)
        for key, item in value.items()
    }


def remember_secrets(text: str) -> None:
    """Let `mask` hide the secrets that a text reads from environment variables."""
    for name in _FROM_ENVIRONMENT.findall(text):
        value = os.environ.get(name)
        if value and is_secret_name(name):
            _environment_secrets[value] = f"${{oc.env:{name}}}"
