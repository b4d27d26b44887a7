"""Recognize the formats of an input's files, and check that they belong together.

An input is either texts or records. Next to records, a README, a licence, checksums and
the like are left out; any other text is an error, because it would be lost or would be
read by another rule than the user expects.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import NamedTuple

from data.errors import DataError
from data.storage import is_remote
from data.text.files import File, Format, Refusal
from data.text.kinds import formats_in_words, recognize
from data.text.plain_text import TEXT
from data.text.records import ReadSettings

_NUM_REQUESTS = 16  # of remote files, at the same time
_MAX_LISTED = 8
# Files that describe other files. Among texts they are texts like others.
_COMPANION = re.compile(
    r"(readme|license|licence|copying|copyright|notice|authors|contributors|changelog"
    r"|changes|citation|contributing|manifest|metadata|dataset_(infos?|dict|card)"
    r"|datacard|data_card|croissant|index|stats|statistics|checksums?|\w+sums?"
    r"|_success|_metadata|_common_metadata|_(started|committed)_\w+)"
    r"([-_.]\w+)*|.+\.(md5|sha1|sha256|sha512|crc|crc32|sig|asc)"
)

_log = logging.getLogger(__name__)


class Classified(NamedTuple):
    """Files whose formats are known, and files that cannot be read."""

    files: list[File]
    refused: list[File]


def classify(
    files: Sequence[File],
    settings: ReadSettings,
    formats: Sequence[Format],
    skip_refused: bool = False,
    beat: Callable[[], object] = lambda: None,
) -> Classified:
    """Recognize the format of each file, of any number of inputs.

    `beat` is called for each file, to report progress. Raises DataError if a file
    cannot be opened, an input holds texts and records, no file of it can be read, or a
    file cannot be read and `skip_refused` is false.
    """
    by_input = defaultdict[str, list[File | Refusal]](list)
    for result in _recognize_all(files, settings, formats):
        beat()
        file = result.file if isinstance(result, Refusal) else result
        by_input[file.input].append(result)
    classified = Classified([], [])
    for name, results in by_input.items():
        refusals = [result for result in results if isinstance(result, Refusal)]
        known = [result for result in results if isinstance(result, File)]
        known = _without_companions(name, known)
        if refusals and (not skip_refused or not known):
            raise _refusal_error(name, refusals, formats, skip_refused)
        _check_one_kind(name, known)
        counts = Counter(file.format.name for file in known)
        listed = ", ".join(f"{count} as {format}" for format, count in counts.items())
        _log.info("%s: files are read: %s", name, listed)
        classified.files.extend(known)
        classified.refused.extend(refusal.file for refusal in refusals)
    return classified


def _recognize_all(
    files: Sequence[File], settings: ReadSettings, formats: Sequence[Format]
) -> Iterator[File | Refusal]:
    num_threads = _NUM_REQUESTS if any(is_remote(file.path) for file in files) else 1
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(lambda file: recognize(file, settings, formats), files)


def _without_companions(input_name: str, files: list[File]) -> list[File]:
    """Return the files without those that only describe the records among them."""
    if all(file.format == TEXT for file in files):
        return files
    kept = [file for file in files if not _is_companion(file)]
    if not kept or len(kept) == len(files):
        return files
    names = [file.name for file in files if file not in kept]
    message = "%s: left out of the records: %s"
    _log.info(message, input_name, ", ".join(names[:_MAX_LISTED]))
    return kept


def _is_companion(file: File) -> bool:
    name = PurePosixPath(file.name.lower()).name
    if file.format != TEXT:
        return name in ("_metadata", "_common_metadata")
    return file.size == 0 or _COMPANION.fullmatch(name) is not None


def _check_one_kind(input_name: str, files: Sequence[File]) -> None:
    """Raise DataError if an input holds texts and records."""
    is_text = {file.format == TEXT for file in files}
    if len(is_text) < 2:
        return
    by_group = defaultdict[tuple[str, str], list[File]](list)
    for file in files:
        suffixes = PurePosixPath(file.name).suffixes[-2:]
        if len(suffixes) == 2 and file.compression != suffixes[1].lower():
            suffixes = suffixes[1:]
        by_group[file.format.kind, "".join(suffixes)].append(file)
    kinds_of = defaultdict[str, set[str]](set)
    for kind, suffix in by_group:
        kinds_of[suffix].add(kind)
    lines = []
    groups = sorted(by_group.items(), key=lambda group: -len(group[1]))
    for (kind, suffix), group in groups[:_MAX_LISTED]:
        line = f"    {len(group)} of {kind}, such as {group[0].name}"
        if suffix and len(kinds_of[suffix]) == 1:
            line += f": pattern='**/*{suffix}'"
        elif len(group) == 1:
            line += f": name it alone, {group[0].path}"
        else:
            line += ": move them to a folder of their own"
        lines.append(line)
    counts = Counter(file.format.kind for file in files)
    listed = " and ".join(f"{count} of {kind}" for kind, count in counts.items())
    raise DataError(
        f"{input_name}: holds files of more than one kind ({listed}). Choose one "
        f"(with the prefix data. in training):\n"
        + "\n".join(lines)
        + "\n  format=text reads all of them as text. To train on all, make a store of "
        "each kind (python -m data.prepare) and mix them (data=mixture)"
    )


def _refusal_error(
    input_name: str,
    refusals: Sequence[Refusal],
    formats: Sequence[Format],
    skip_refused: bool,
) -> DataError:
    first = refusals[0]
    message = f"{first.file.path}: is {first.kind}, which is not read. {first.remedy}. "
    if len(refusals) > 1:
        counts = Counter(refusal.kind for refusal in refusals)
        listed = ", ".join(f"{count} of {kind}" for kind, count in counts.most_common())
        message += f"{input_name} holds {len(refusals)} such files ({listed}). "
    message += f"{formats_in_words(formats)}. "
    if skip_refused:
        return DataError(message + "on_error=skip leaves no file of this input")
    return DataError(
        message + "To read the other files, add on_error=skip (data.on_error in "
        "training); format=text (data.format) reads any valid UTF-8 as text"
    )
