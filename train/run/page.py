"""Pages that need no network: a template's style and script around data as JSON.

`page.html` holds what all pages share, a template beside the caller what only its page
has. A browser draws the page; here it is only put together. Texts in the data stay
texts: nothing in them can end the block they stand in.
"""

import json
from pathlib import Path
from typing import Any

from etils import epath

from data.storage import write_atomically

_SHARED = Path(__file__).with_name("page.html")


def write_page(path: epath.Path, template: Path, data: dict[str, Any]) -> None:
    """Write a page atomically, on a local disk or under `gs://` or `s3://`.

    Args:
        path: of the HTML file.
        template: `<style>`, `<body>` and the script that draws `data`.
        data: what JSON can hold, without NaN and infinities.

    Raises:
        ValueError: there is NaN or an infinity in the data.
        OSError: the page cannot be written.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    page = _SHARED.read_text().replace("{{template}}", template.read_text())
    before, after = page.split("{{data}}")
    write_atomically(path, before + text.replace("<", "\\u003c") + after)
