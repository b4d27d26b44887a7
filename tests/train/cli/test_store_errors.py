"""A store that cannot be used ends a command with a sentence, not with a traceback."""

import sys
import threading

import aiohttp
import botocore.exceptions
import pytest
import requests
from etils import epath

from data import storage
from train.cli.command import Command, run_command
from train.errors import CRASHED, ConfigError, Exit
from train.run.folder import check_store


@pytest.mark.parametrize(
    "error",
    [
        aiohttp.ClientError("Cannot connect to host x"),
        botocore.exceptions.HTTPClientError(error="Cannot connect to host x"),
        requests.ConnectionError("Cannot connect to host x"),
    ],
    ids=lambda error: type(error).__module__,
)
def test_an_error_of_a_store_client_is_shown_as_a_sentence(monkeypatch, capsys, error):
    def main(config):
        raise error

    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit) as end:
        run_command(Command(main))
    assert end.value.code == CRASHED
    message = capsys.readouterr().err
    assert "cannot be used (" in message
    assert "Cannot connect to host x" in message


def test_an_error_of_this_program_keeps_its_traceback(monkeypatch):
    def main(config):
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(ZeroDivisionError):
        run_command(Command(main))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ClientError("no route"), Exit),
        (OSError("broken"), Exit),
        (PermissionError("Forbidden"), ConfigError),
        (None, Exit),
    ],
)
def test_the_store_of_a_run_must_answer(monkeypatch, error, kind):
    def exists(path):
        if error:
            raise error
        release.wait()

    release = threading.Event()
    monkeypatch.setattr(storage, "FIRST_ANSWER_S", 0.2)
    monkeypatch.setattr(epath.Path("s3://bucket/x").__class__, "exists", exists)
    with pytest.raises(kind, match="s3://bucket"):
        check_store(epath.Path("s3://bucket/x"))
    release.set()


def test_a_local_run_needs_no_answer(tmp_path):
    check_store(epath.Path(tmp_path))
