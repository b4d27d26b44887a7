"""Secrets are recognised in one place, and leave no trace in files and output."""

import logging
import sys
from dataclasses import replace

import pytest

from train.cli import command
from train.cli.command import compose, config_yaml, read_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from train.identity import config_differences, run_name
from train.masking import is_secret_name, mask

URL = "http://user:pass%40word@host:5000/path"
MASKED = "http://user:***@host:5000/path"
BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 200)
)


def test_a_secret_is_known_by_a_word_in_its_name():
    secrets = "MYTOKENS API_KEY_2 DB_PASS DB_PWD apiKey GITHUB_PAT DBPASS HF_TOKEN"
    secrets += " WANDB_API_KEY AWS_SECRET_ACCESS_KEY MYSQL_PASSWORD GOOGLE_CREDENTIALS"
    secrets += " CLIENT_SECRET"
    others = "TOKENIZERS_PARALLELISM PWD KEYBOARD MONKEY COMPASS token_shift"
    others += " from_tokens"
    others += " tokenizer keep_latest XLA_FLAGS WEB_IDENTITY_TOKEN_FILE MY_KEY_PATH"
    assert [name for name in secrets.split() if not is_secret_name(name)] == []
    assert [name for name in others.split() if is_secret_name(name)] == []


def test_passwords_in_urls_are_masked_and_nothing_else():
    assert mask(f"{URL}, postgres://a:b@c@d/e") == f"{MASKED}, postgres://a:***@d/e"
    assert mask("https://ghp_abcdefgh@github.com/x") == "https://***@github.com/x"
    signed = "https://h/x?a=b&X-Amz-Signature=0ab1&token=c#d"
    assert mask(signed) == "https://h/x?a=b&X-Amz-Signature=***&token=***#d"
    for text in ("gs://bucket/a@b", "s3://bucket:1/x", "a:b@c", "http://host:80/a"):
        assert mask(text) == text


def test_files_and_output_hold_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", "geheim-123")
    named = "tracker.mlflow.experiment=of-${oc.env:MY_API_KEY}"
    config = compose([f"tracker.mlflow.uri={URL}", named])
    assert config.tracker.mlflow.experiment == "of-geheim-123"  # for the tracker itself
    written = config_yaml(config)
    assert MASKED in written
    assert "of-${oc.env:MY_API_KEY}" in written
    said = str(ConfigError([Mistake("tracker.mlflow.uri", URL, f"no {URL}")]))
    said += str(ConfigError([Mistake("cluster.environment.DB_PASS", "hidden", "no")]))
    monkeypatch.setattr(sys, "argv", ["train"])

    def main(config: Config) -> None:
        logging.getLogger("train").warning("reached %s with geheim-123", URL)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(SystemExit):
        command.run_command(main)
    logged = capsys.readouterr().err
    assert "reached" in logged
    for text in (written, said, logged):
        assert "pass%40word" not in text
        assert "geheim" not in text
        assert "hidden" not in text


def test_another_password_makes_no_other_run():
    one, two = (
        replace(Config(), init_from=url) for url in (URL, URL.replace("word", "w"))
    )
    assert not config_differences(one, two)
    assert run_name(one) == run_name(two)
    assert config_differences(one, replace(one, init_from=URL + "/other"))


def test_a_config_of_someone_else_does_not_read_this_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "geheim-123")
    file = tmp_path / "config.yaml"
    file.write_text("run: {name: '${oc.env:MY_API_KEY}'}\n")
    assert read_yaml(file).run.name == "${oc.env:MY_API_KEY}"


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(BOMB)
    with pytest.raises(ConfigError, match="more than 1,000 values by its aliases"):
        read_yaml(file)
    file.write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match="contains it"):
        read_yaml(file)
