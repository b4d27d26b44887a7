"""List the commands that have their own keys, with the dataclass of these keys."""

from data.inspect import InspectConfig
from data.prepare_config import PrepareConfig
from data.train_tokenizer import TrainTokenizerConfig
from data.verify import VerifyConfig
from train.checkpoints import CheckpointsConfig
from train.coordinates.__main__ import CoordinatesConfig
from train.evaluate.__main__ import EvaluateConfig
from train.export import ExportConfig
from train.plan.config import PlanConfig
from train.profile.__main__ import ProfileConfig
from train.prove.__main__ import ProveConfig
from train.report import ReportConfig
from train.sample.__main__ import SampleConfig
from train.status import StatusConfig

COMMANDS = {
    "train.plan": PlanConfig,
    "train.prove": ProveConfig,
    "train.coordinates": CoordinatesConfig,
    "train.evaluate": EvaluateConfig,
    "train.sample": SampleConfig,
    "train.export": ExportConfig,
    "train.status": StatusConfig,
    "train.profile": ProfileConfig,
    "train.report": ReportConfig,
    "train.checkpoints": CheckpointsConfig,
    "data.prepare": PrepareConfig,
    "data.inspect": InspectConfig,
    "data.verify": VerifyConfig,
    "data.train_tokenizer": TrainTokenizerConfig,
}
