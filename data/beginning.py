"""How a text begins: the token that a model sees before the first token of a text.

In training, this token precedes each document. Sampling, tasks and exported tokenizers
use the same token.
"""

from typing import NamedTuple

import tiktoken

from data.config import DataConfig
from data.encoding import FolderEncoding


class Beginning(NamedTuple):
    """What a trained model sees before a text.

    token: what stands for an empty text.
    in_prompts: whether the token also precedes a text that is not empty.
    """

    token: int
    in_prompts: bool

    def before(self, ids: list[int]) -> list[int]:
        """Return the inputs of a text that begins with these ids."""
        return [self.token, *ids] if self.in_prompts or not ids else ids


def beginning_token(encoding: tiktoken.Encoding) -> int:
    """Return the token that precedes a document in training.

    It is the BOS token that an imported tokenizer adds, otherwise end-of-text.
    """
    bos = encoding.bos_token if isinstance(encoding, FolderEncoding) else None
    return encoding.eot_token if bos is None else bos


def beginning_of(
    config: DataConfig, encoding: tiktoken.Encoding, has_many_documents: bool = True
) -> Beginning:
    """Return the beginning of texts for a model that was trained with a config.

    If documents had no beginning token in training, end-of-text stands for an empty
    text, because it precedes each document. A prompt begins with the token unless the
    model was trained on a single document, whose rows begin with it once an epoch, or
    the tokenizer is an imported one that adds no token before a text.
    """
    if not config.has_beginning_tokens:
        return Beginning(encoding.eot_token, in_prompts=False)
    is_imported = isinstance(encoding, FolderEncoding)
    adds_token = not is_imported or encoding.bos_token is not None
    return Beginning(beginning_token(encoding), has_many_documents and adds_token)
