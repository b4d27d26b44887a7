"""Write HTML pages that need no network: a template, and its data as JSON.

All pages share `page.html`; each caller adds the template of its own page. The
browser draws the page from the data. `<` is escaped in the data, so that no text in it
can end the script block that holds it. Secrets are masked.
"""

import json
from pathlib import Path
from typing import Any

from etils import epath

from data.storage import write_atomically
from train.masking import mask_texts

_SHARED_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: epath.Path, template: Path, data: dict[str, Any]) -> None:
    """Write a page atomically to a local or remote path.

    The template contains `<style>`, `<body>` and the script that draws `data`.

    Raises:
        ValueError: the data contains NaN or an infinity.
        OSError: the page cannot be written.
    """
    text = json.dumps(mask_texts(data), separators=(",", ":"), allow_nan=False)
    page = _SHARED_TEMPLATE.read_text().replace("{{template}}", template.read_text())
    head, tail = page.split("{{data}}")
    write_atomically(path, head + text.replace("<", "\\u003c") + tail)
