"""A page of HTML, taken apart."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects text, scripts and resources, and checks that tags are balanced."""

    VOID = ("meta",)

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.text, self.scripts = [], [], "", []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data + "\n"
