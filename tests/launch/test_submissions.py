"""Submissions are recorded in the run's directory, and read back."""

import pytest

from data.errors import DataError
from launch.submissions import newest_submission


@pytest.mark.parametrize("content", ['{"arguments": [', "[]", "", '{"cluster": 1}'])
def test_a_damaged_record_is_reported_as_damaged_data(tmp_path, content):
    folder = tmp_path / "launch" / "1"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    with pytest.raises(DataError, match=r"launch/1/record\.json: .*Put it back"):
        newest_submission(str(tmp_path))
