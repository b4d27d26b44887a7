"""A job's processes get a secret as a variable; no file and no argument shows it."""

import re
import subprocess

import pytest

from launch.config import kind_of
from launch.job_secret import MAKE_SECRET_LINE, SECRET_VARIABLE, secret_variable
from tests.launch.kinds import GOLDEN, render
from train.masking import holds_secret


@pytest.mark.parametrize("cluster", GOLDEN.values(), ids=kind_of)
def test_rendered_files_name_the_variable_and_hold_no_secret(cluster):
    rendered = render(cluster)
    lines = [*rendered.preparation, " ".join(rendered.command)]
    texts = {**rendered.files, "command": "\n".join(lines)}
    assert any(SECRET_VARIABLE in text for text in texts.values())
    for name, text in texts.items():
        assert not holds_secret(text), name
        values = re.findall(rf"{SECRET_VARIABLE}[=:](\S+)", text)
        assert all(value.startswith(("$", '"$')) for value in values), name


def test_each_attempt_has_another_secret():
    assert secret_variable(1) == {}
    assert secret_variable(2) != secret_variable(2)
    secrets = set()
    for _ in range(2):
        words = ["bash", "-c", f'{MAKE_SECRET_LINE}; echo -n "${SECRET_VARIABLE}"']
        secrets.add(subprocess.run(words, capture_output=True, text=True).stdout)
    assert len(secrets) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", secret) for secret in secrets)
