"""Recognise secrets, and mask them in whatever is written or shown.

A secret is the value of a name that says so (`DB_PASS`, `API_KEY_2`, `MYTOKENS`), the
password in a URL, or what an environment variable of such a name holds that
`${oc.env:NAME}` was resolved with.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_WORD = re.compile(
    r"""(\w*(token|secret|password|passwd|passphrase|credential|apikey|accesskey)s?
        |keys?|pass|dbpass|pwd|pat|auth|authorization)""",
    re.IGNORECASE | re.VERBOSE,
)
_NAMES_A_PLACE = re.compile(r"_(file|path|dir|url|uri|host)$", re.IGNORECASE)
_FOLDERS = ("PWD", "OLDPWD")  # variables of every shell that hold folders
_URL_PASSWORD = re.compile(r"""([A-Za-z][\w+.-]*://[^\s/:@?#]*:)([^\s/"']+)(?=@)""")
_URL_TOKEN = re.compile(r"(?<=://)[^\s/:@?#]{8,}(?=@)")  # https://<token>@host
_URL_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^\s&#]+)")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_MIN_LENGTH = 6  # shorter values are not masked within a text: they may be any word

_known: dict[str, str] = {}  # value, and the interpolation that it came from


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is a secret."""
    if name in _FOLDERS or _NAMES_A_PLACE.search(name):
        return False
    words = re.split(r"[^A-Za-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    return any(_WORD.fullmatch(word) for word in words)


def holds_secret(value: str) -> bool:
    """Return whether a text holds a secret, whatever its name is."""
    return mask(value) != value


def mask(text: str) -> str:
    """Return a text without the secrets in it."""
    for secret, source in _known.items():
        if len(secret) >= _MIN_LENGTH or secret == text:
            text = text.replace(secret, source)
    if "://" not in text:
        return text
    text = _URL_TOKEN.sub(MASK, _URL_PASSWORD.sub(rf"\1{MASK}", text))
    return _URL_QUERY.sub(
        lambda found: (
            f"{found[1]}={MASK}"
            if is_secret_name(found[1]) or "signature" in found[1].lower()
            else found[0]
        ),
        text,
    )


def mask_values(value: Any) -> Any:
    """Return plain values without the secrets in them, also by the names of keys."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list | tuple):
        return [mask_values(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: each
        if key == "secrets"  # names of secrets, where others may read them
        else MASK
        if isinstance(each, str) and each and is_secret_name(str(key))
        else mask_values(each)
        for key, each in value.items()
    }


def remember_secrets(text: str) -> None:
    """Mask from now on what the secret variables hold that a text names."""
    for name in _FROM_ENVIRONMENT.findall(text):
        value = os.environ.get(name)
        if value and is_secret_name(name):
            _known[value] = f"${{oc.env:{name}}}"
