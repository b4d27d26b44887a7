"""Compare everything in a token store with its manifest."""

import hashlib
from collections.abc import Iterator

from data.errors import DataError
from data.splits import SPLITS
from data.token_store.store import Store


def verify_store(store: Store) -> Iterator[str]:
    """Read all arrays; yield a message for each difference from the manifest."""
    for split in SPLITS:
        try:
            array = store.open(split, keep=False)
        except DataError as error:
            yield str(error)
            continue
        for name, digest in store.manifest["digests"][split].items():
            content = hashlib.sha256()
            try:
                for values in array.iterate_shards(name):
                    content.update(values.data)
            except DataError as error:
                yield str(error)
                continue
            if content.hexdigest() != digest:
                array_name = f"{store.path}/{split}/{name}"
                yield f"{array_name}: its values are not those of the manifest"
