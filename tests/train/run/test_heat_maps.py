"""Metrics of layers become heat maps, whatever values they contain."""

import json

from tests.train.pages import data_of, drawn
from train.run.heat_maps import heat_maps
from train.run.report import write_report


def test_a_picture_has_a_row_for_each_layer_and_a_column_for_each_step(tmp_path):
    values = {5: (1.0, 8.0, 2), 9: (4.0, None, 3)}
    layers = (0, 1, 10)  # they are sorted as numbers
    rows = [
        {
            "step": step,
            **{f"numerics/mlp/{i}": v for i, v in zip(layers, row, strict=True)},
        }
        for step, row in values.items()
    ]
    rows.insert(1, {"step": 7, "loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    html = write_report(tmp_path).read_text()
    (drawing,) = data_of(html)["heat_maps"]
    assert drawing["steps"] == [5, 9]
    assert drawing["layers"] == [[1, 4], [8, None], [2, 3]]
    assert (drawing["low"], drawing["high"]) == (1, 8)
    page = drawn(html)
    assert "\nLargest value of MLP or experts\n1 to 8; red: not finite\n" in page.text
    paths = [v for name, v in page.attributes if name == "d" and v and v[-1] == "z"]
    assert paths[-1] == "M50.00 33.33h50.00v33.33h-50.00z"  # the value is not finite
    assert paths[0] == "M0.00 0.00h50.00v33.33h-50.00z"  # the smallest value
    assert sum(path.count("M") for path in paths) == 6


def test_many_steps_share_columns_by_their_largest_value():
    rows = [{"step": s, "numerics/residual/0": float(s % 50)} for s in range(1000)]
    rows[450]["numerics/residual/0"] = None
    (drawing,) = heat_maps(rows)
    (values,) = drawing["layers"]
    assert len(values) == len(drawing["steps"]) == 112
    assert max(value for value in values if value is not None) == 49
    assert values.count(None) == 1
    assert drawing["steps"][-1] == 999
