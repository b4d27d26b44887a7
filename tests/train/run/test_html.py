"""Every page is written whole, with what it is given and nothing else."""

from train.run.html import page, write_page


def test_parts_stand_where_they_belong_and_are_not_read_again():
    text = page("a<b", "{{js}}", "--a: 1;", "--b: 2;", "i { }", "let x = 1")
    assert "<title>a&lt;b</title>" in text
    assert text.count("{{js}}") == 1
    assert text.count("<script>let x = 1</script>") == 1
    light, dark = text.split("@media")[:2]
    assert "--a: 1;" in light
    assert "--b: 2;" in dark
    assert "{{" not in text.replace("{{js}}", "")


def test_a_page_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    for text in ("old", "new"):
        write_page(tmp_path / "page.html", text)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "new"
