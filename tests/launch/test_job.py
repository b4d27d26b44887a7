"""Secrets in plain text are refused before a job is submitted."""

import pytest

from launch.job import environment_mistakes, secret_mistakes

REMEDY = "keep it elsewhere"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("MYTOKENS", "x"), ("API_KEY_2", "x"), ("DB_PASS", "x"), ("WANDB_KEY", "x")),
        ("DATABASE_URL", "postgres://user:password@host/db"),
    ],
)
def test_a_secret_in_the_environment_of_a_job_is_refused(name, value):
    (mistake,) = environment_mistakes({name: value, "TOKEN_FILE": "/a"}, REMEDY)
    assert mistake.key == f"cluster.environment.{name}"
    assert mistake.value == "(not shown)"
    assert mistake.rule.endswith(REMEDY)


def test_a_secret_on_the_command_line_of_a_job_is_refused():
    words = ["seed=1", "tracker.mlflow.uri=http://user:password@host", "data=text"]
    (mistake,) = secret_mistakes(words, REMEDY)
    assert mistake.key == "tracker.mlflow.uri"
    assert "password@" not in str(mistake)
    # The variable's value is read on the cluster.
    assert not secret_mistakes(["tracker.mlflow.uri=${oc.env:MLFLOW_URI}"], REMEDY)
