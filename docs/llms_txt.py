"""A hook of mkdocs that writes llms.txt, an index for language models (llmstxt.org).

It lists the pages and sections of the navigation, each page with its first sentence.
The plugin mkdocs-llmstxt (0.5) needs a site_url, and a second list of all pages.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_SKIPPED = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
_NO_PROSE = re.compile(r"[#|!<-]|\d+\. |$")  # headings, tables, images, lists
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r".*?[.?!](?=\s|$)")


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Add llms.txt to the files of the site."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += [_entry(item) for item in nav.items if isinstance(item, Page)]
    for section in nav.items:
        if isinstance(section, Section):
            pages = [page for page in section.children if isinstance(page, Page)]
            lines += ["", f"## {section.title}", "", *map(_entry, pages)]
    content = "\n".join(lines) + "\n"
    files.append(File.generated(config, "llms.txt", content=content))
    return nav


def _entry(page: Page) -> str:
    """Return a line with the title, the address and the first sentence of a page."""
    text = _SKIPPED.sub("", page.file.content_string)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    prose = next((part for part in paragraphs if not _NO_PROSE.match(part)), title)
    paragraph = _LINK.sub(r"\1", prose)
    sentence = _SENTENCE.match(paragraph)
    description = sentence[0] if sentence else paragraph.rstrip(":") + "."
    return f"- [{title}]({page.canonical_url or page.file.url}): {description}"
