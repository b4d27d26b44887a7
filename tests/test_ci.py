"""What `.ci/run` must know of the tests."""

from tests.fleet import REPOSITORY


def test_every_file_with_slow_tests_has_its_turn():
    lines = (REPOSITORY / ".ci/slow").read_text().splitlines()
    listed = [line.split()[1] for line in lines if not line.startswith("#")]
    marked = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if "pytest.mark.slow" in path.read_text()
    ]
    assert listed == [path for path in marked if path != "tests/test_ci.py"]
