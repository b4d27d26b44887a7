"""One command draws all pictures of the documentation."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.fleet import REPOSITORY

IMAGES = REPOSITORY / "docs/images"


def test_every_picture_is_shown_on_a_page():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    shown = set(re.findall(r"!\[[^]]*\]\([./a-z]*images/([a-z]+\.png)\)", text))
    assert shown == {path.name for path in IMAGES.iterdir()}


@pytest.mark.slow
@pytest.mark.tpu
def test_the_pictures_of_the_documentation_can_be_drawn(tmp_path):
    """Each new picture is as wide as the committed one, and is not blank."""
    if os.environ.get("LONGHAUL_FULL") != "1":
        if not shutil.which("chromium"):
            pytest.skip("needs chromium")
        pytest.importorskip("libtpu")
        pytest.importorskip("matplotlib")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.pictures", str(tmp_path)],
        cwd=REPOSITORY,
        check=True,
    )
    from matplotlib.image import imread

    for committed in IMAGES.iterdir():
        drawn = imread(tmp_path / committed.name)
        assert drawn.shape[1] == imread(committed).shape[1]
        halves = np.array_split(drawn[..., :3], 2)
        assert all(half.std() > 0.02 for half in halves)
