"""Secrets are recognised in one place, and leave no trace in files and output."""

import json
import logging
import sys
import warnings
from dataclasses import replace
from typing import ClassVar

import pytest
from etils import epath

from data.errors import DataError, Mistake
from data.program import PREFIX
from tests.train.planted import PLANTED, READABLE
from train import masking
from train.cli import command
from train.cli.command import compose, config_yaml
from train.cli.quoting import hydra_text
from train.cli.schema import read_yaml
from train.config import Config
from train.errors import ConfigError
from train.identity import config_differences, flatten, run_name
from train.masking import holds_secret, is_secret_name, mask, mask_output, mask_values
from train.page import write_page
from train.records import json_compatible
from train.run.evaluations import write_evaluation
from train.run.metrics import EventLog
from train.run.report import TEMPLATE, write_report
from train.run.this_start import ThisStart

URL = "http://user:pass%40word@host:5000/path"
MASKED = "http://user:***@host:5000/path"
BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 200)
)


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch):
    monkeypatch.setattr(masking, "_environment_secrets", {})
    monkeypatch.setattr(masking, "_config_secrets", set())


def test_a_secret_is_known_by_a_word_in_its_name():
    secrets = "MYTOKENS API_KEY_2 DB_PASS DB_PWD apiKey GITHUB_PAT DBPASS HF_TOKEN"
    secrets += " WANDB_API_KEY AWS_SECRET_ACCESS_KEY MYSQL_PASSWORD GOOGLE_CREDENTIALS"
    secrets += " CLIENT_SECRET"
    harmless = "TOKENIZERS_PARALLELISM PWD KEYBOARD MONKEY COMPASS token_shift"
    harmless += " from_tokens"
    harmless += " tokenizer keep_latest XLA_FLAGS WEB_IDENTITY_TOKEN_FILE MY_KEY_PATH"
    assert [name for name in secrets.split() if not is_secret_name(name)] == []
    assert [name for name in harmless.split() if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "url",
    [
        "https://name:Zq9SECRETzQ9@host/x",
        "https://host/x?a=b&sig=Zq9SECRETzQ9",
        "DefaultEndpointsProtocol=https;AccountKey=Zq9SECRETzQ9;EndpointSuffix=x",
    ],
)
def test_a_part_of_a_url_that_a_library_shows_is_masked(url):
    assert mask_output("no host Zq9SECRETzQ9 there") == "no host Zq9SECRETzQ9 there"
    compose([hydra_text("data.path", url)])
    assert mask_output("no host Zq9SECRETzQ9 there") == "no host *** there"
    assert mask_output("name host https Endpoint") == "name host https Endpoint"


def test_every_secret_of_a_long_text_is_remembered(monkeypatch):
    monkeypatch.setenv("DB_PASS", "Zq9ENVIRONMENT")
    urls = " ".join(f"https://host/x?sig=Zq9SECRETzQ{n}x" for n in range(10, 60))
    compose([hydra_text("tracker.mlflow.experiment", urls)])
    assert mask_output("Zq9SECRETzQ10x and Zq9SECRETzQ59x") == "*** and ***"
    # The name of the variable replaces its value, and is longer.
    compose([f'tracker.mlflow.experiment="{urls} ${{oc.env:DB_PASS}} {urls}"'])
    assert mask_output("at Zq9ENVIRONMENT") == "at ${oc.env:DB_PASS}"


def test_passwords_in_urls_are_masked_and_nothing_else():
    assert mask(f"{URL}, postgres://a:b@c@d/e") == f"{MASKED}, postgres://a:***@d/e"
    assert mask("https://ghp_abcdefgh@github.com/x") == "https://***@github.com/x"
    signed_url = "https://h/x?a=b&X-Amz-Signature=0ab1&token=c#d"
    assert mask(signed_url) == "https://h/x?a=b&X-Amz-Signature=***&token=***#d"
    for text in ("gs://bucket/a@b", "s3://bucket:1/x", "a:b@c", "http://host:80/a"):
        assert mask(text) == text


def test_files_and_output_hold_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", "geheim-123")
    experiment = "tracker.mlflow.experiment=of-${oc.env:MY_API_KEY}"
    config = compose([f"tracker.mlflow.uri={URL}", experiment])
    # The tracker gets the true value.
    assert config.tracker.mlflow.experiment == "of-geheim-123"
    yaml_text = config_yaml(config)
    assert MASKED in yaml_text
    assert "of-${oc.env:MY_API_KEY}" in yaml_text
    errors = str(ConfigError([Mistake("tracker.mlflow.uri", URL, f"no {URL}")]))
    errors += str(ConfigError([Mistake("cluster.environment.DB_PASS", "hidden", "no")]))
    monkeypatch.setattr(sys, "argv", ["train"])

    def main(config: Config) -> None:
        logging.getLogger(f"{PREFIX}train").warning("reached %s with geheim-123", URL)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(SystemExit):
        command.run_command(command.Command(main))
    log_output = capsys.readouterr().err
    assert "reached" in log_output
    for text in (yaml_text, errors, log_output):
        assert "pass%40word" not in text
        assert "geheim" not in text
        assert "hidden" not in text


def test_another_password_does_not_change_the_run():
    first, second = (
        replace(Config(), init_from=url) for url in (URL, URL.replace("word", "w"))
    )
    assert not config_differences(first, second)
    assert run_name(first) == run_name(second)
    assert config_differences(first, replace(first, init_from=URL + "/other"))


def test_a_config_of_someone_else_does_not_read_this_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "geheim-123")
    file = tmp_path / "config.yaml"
    data = "data: {document_start: true}\n"
    file.write_text(f"run: {{name: '${{oc.env:MY_API_KEY}}'}}\n{data}")
    assert read_yaml(file).run.name == "${oc.env:MY_API_KEY}"


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(BOMB)
    with pytest.raises(ConfigError, match="more than 1,000 values by its aliases"):
        read_yaml(file)
    file.write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match="contains it"):
        read_yaml(file)


@pytest.mark.parametrize(("text", "secret"), PLANTED.values(), ids=PLANTED)
def test_a_secret_of_any_form_is_masked_once(text, secret):
    for message in (text, f"cannot read {text}: no", f"['{text}', 1]", f"{text}\nmore"):
        masked = mask(message)
        assert secret not in masked
        assert mask(masked) == masked  # masked records can be compared
    assert holds_secret(text)


@pytest.mark.parametrize("text", READABLE)
def test_text_without_a_secret_stays_readable(text):
    assert mask(text) == text


def test_no_key_of_any_command_has_a_secrets_name():
    names = {name for key in flatten(Config()) for name in key.split(".")}
    assert [name for name in names if is_secret_name(name)] == []


NAMED = "JWT COOKIE PRIVATEKEY DBPW SLACK_WEBHOOK_URL AccountKey SharedAccessKey"
NAMED += " CONNECTION_STRING TOKEN_GITHUB sessionCookie MASTER_KEY smtpPass CREDS"


@pytest.mark.parametrize("name", NAMED.split())
def test_values_of_secret_names_are_masked_in_any_nesting(name):
    tree = {"a": [{name: "Planted5ecret"}], name: {"b": ["Planted5ecret"]}}
    assert "Planted5ecret" not in str(mask_values(tree))
    assert mask_values({name: True}) == {name: True}
    config = {"environment": {name: "Planted5ecret"}}
    assert "Planted5ecret" not in str(ConfigError([Mistake("a.b", config, "no")]))


def test_variables_with_secret_names_are_masked_in_output_only(monkeypatch):
    monkeypatch.setenv("MY_ACCESS_TOKEN", "Planted5ecret")
    monkeypatch.setenv("MY_SECRET", "12345678")
    assert mask_output("at Planted5ecret/x") == "at ${oc.env:MY_ACCESS_TOKEN}/x"
    assert mask_output("step 12345678") == "step 12345678"
    assert mask("at Planted5ecret/x") == "at Planted5ecret/x"  # records are compared


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a command in this process; return everything that it prints."""

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        try:
            command.run_command(command.Command(main))
        except SystemExit:
            pass
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("kind", [RuntimeError, DataError, OSError])
def test_no_output_of_a_command_shows_a_secret(printed, kind):
    def main(config: Config) -> None:
        for text, _ in PLANTED.values():
            print("found", text)
            print(text, file=sys.stderr)
            logging.getLogger(f"{PREFIX}train").warning("found %s", text)
            warnings.warn(text, stacklevel=1)
            try:
                raise ValueError(text)
            except ValueError:
                logging.getLogger(f"{PREFIX}train").exception("failed with %s", text)
        raise kind("\n".join(text for text, _ in PLANTED.values()))

    output = printed(main)
    assert output.count("found") >= 2 * len(PLANTED)
    assert [name for name, (_, secret) in PLANTED.items() if secret in output] == []


ARGUMENTS = [
    *("data.path={}", "unknown.key={}", "model.num_layers={}", "optimizer.groups=[{}"),
    *('init_from="{}', "run.name={}({{", "{}", "+{}=1", "optimizer={}", "seed={}"),
]
FLAGS = [[], ["--cfg", "job"], ["--cfg", "all"], ["--cfg", "hydra"], ["--info"]]


# Each takes half a second, so that fast tests try a third of the secrets.
NUMBERS = [
    pytest.param(number, id=name, marks=[pytest.mark.slow] * (number % 3 > 0))
    for number, name in enumerate(PLANTED)
]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_message_about_an_argument_shows_a_secret(printed, number):
    """Each form is tried in one argument with some flags, the first form in all."""
    text, secret = [*PLANTED.values()][number]
    pairs = [(ARGUMENTS[number % len(ARGUMENTS)], FLAGS[number % len(FLAGS)])]
    if number == 0:
        pairs = [(argument, flags) for argument in ARGUMENTS for flags in FLAGS]
    for argument, flags in pairs:
        output = printed(lambda config: None, *flags, argument.replace("{}", text))
        assert secret not in output, (argument, flags)
    override = hydra_text("tracker.mlflow.experiment", text)
    assert secret not in printed(lambda config: None, "--cfg", "job", override)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_config_with_a_secret_of_the_environment_can_be_read_again(
    monkeypatch, tmp_path, number
):
    """No rule masks a part of the `${oc.env:NAME}` that stands for the secret."""
    text, secret = [*PLANTED.values()][number]
    monkeypatch.setenv("MY_API_KEY", secret)
    masking.remember_secrets("${oc.env:MY_API_KEY}")
    all_texts = " ".join(text for text, _ in PLANTED.values())
    pair = f"s3://{secret}:{secret}@host/path?sig={secret} {text}"
    for value in (text, all_texts, pair):
        mlflow = replace(Config().tracker.mlflow, experiment=value)
        tracker = replace(Config().tracker, mlflow=mlflow)
        yaml_text = config_yaml(replace(Config(), tracker=tracker))
        assert secret not in yaml_text
        file = tmp_path / "config.yaml"
        file.write_text(yaml_text)
        experiment = read_yaml(file).tracker.mlflow.experiment
        assert mask(experiment or "") == mask(value)


def test_no_record_of_a_run_holds_a_secret(tmp_path):
    """The test writes every kind of record: of the config, errors and results."""
    all_texts = " ".join(t for t, _ in PLANTED.values() if "oc.env" not in t)
    words = [hydra_text("tracker.mlflow.experiment", all_texts)]
    words.append(hydra_text("init_from", PLANTED["amazon signature"][0]))
    words.append(hydra_text("run.name", f"of-{PLANTED['hugging face'][0]}"))
    config = compose(words)
    # The program uses the true text.
    assert config.tracker.mlflow.experiment == all_texts
    run = tmp_path / "run"
    path = epath.Path(run)
    start = ThisStart(path, config, _Sources())
    start.record(1, schedule_steps=2)
    replace(start, config=replace(config, seed=3)).record(2, schedule_steps=2)
    later_config = replace(config, init_from=PLANTED["azure sas"][0])
    replace(start, config=later_config).record(3, schedule_steps=2)
    description = start.checkpoint_metadata({}, 2)
    (run / "description.json").write_text(json.dumps(description))
    events = EventLog(path)
    events.record("crash", error=all_texts, details={"lines": [all_texts]})
    events.close()
    write_evaluation(path, 1, {"task_path": all_texts}, {"eval/loss": 1.0})
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (run / "results.json").write_text(
        json.dumps(json_compatible({"sample": all_texts}))
    )
    write_report(run)
    write_page(path / "page.html", TEMPLATE, {"command": all_texts, "n": [1.5]})
    files = [file for file in run.rglob("*") if file.is_file()]
    assert len(files) >= 9
    for file in files:
        content = file.read_text()
        assert [n for n, (_, secret) in PLANTED.items() if secret in content] == [], (
            file
        )
    # A start with the same command finds its own config again.
    assert config_differences(read_yaml(path / "config.yaml"), config) == []


class _Sources:
    """Data with the fingerprints that records state."""

    fingerprint = "f"
    fingerprints: ClassVar = {"text": "f"}
