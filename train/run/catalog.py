"""The views of a run, as a value. No other module of a start names them."""

from train.run.live_report import LiveReport
from train.run.tracker import open_tracker
from train.run.views import RunViews

VIEWS = RunViews(open_report=LiveReport, open_tracker=open_tracker)
