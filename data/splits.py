"""The two splits of the documents: those to train on, and those held out."""

from typing import Literal

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
