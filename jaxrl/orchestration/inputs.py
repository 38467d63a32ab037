"""What each process of a run reads for itself, compared before anything is written.

The config is compared when the processes meet; the files that it names may still differ from host
to host: an older copy of the data, other weights in a folder of the same name.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.distributed.sides import differences
from jaxrl.errors import DataError
from jaxrl.orchestration import hosts

if TYPE_CHECKING:
    from jaxrl.orchestration.session import Parts

_BLOCKS, _BLOCK_BYTES = 64, 1 << 14
"""What is looked at of a file of weights: others differ everywhere, and reading all takes long."""


def require_same(parts: Parts) -> None:
    """Raise `DataError`, on every process, unless all have read the same; and on every process
    what `parts` raises on one."""
    if hosts.count() == 1:
        return

    def read() -> dict[str, str]:
        parts.check()
        return read_digests(parts)

    told = dict(enumerate(hosts.exchange("reading what the config names", read)))
    if different := differences(told):
        raise DataError(f"processes read different files: {'; '.join(different)}")


def read_digests(parts: Parts) -> dict[str, str]:
    """What was read, and its digest."""
    data, weights = parts.config.data, parts.config.model.weights
    asked = None if parts.chat is None else parts.chat.encode("1")
    vocabulary = sorted(parts.tokenizer.inner.get_vocab(with_added_tokens=True).items())
    source = data.path or data.task
    digests = {
        f"training examples of {source}": _digest(map(dataclasses.asdict, parts.train_examples)),
        f"held-out examples of {source}": _digest(map(dataclasses.asdict, parts.eval_examples)),
        f"tokenizer {data.tokenizer}": _digest([vocabulary, parts.stop_ids, asked]),
    }
    return digests | ({f"weights in {weights}": _weights_digest(weights)} if weights else {})


def _digest(values: Any) -> str:
    sha = hashlib.sha256()
    for value in values:
        sha.update(f"{value!r}\n".encode(errors="surrogatepass"))
    return sha.hexdigest()[:16]


def _weights_digest(path: str) -> str:
    """Of the names and sizes of the files, and of blocks that are spread over each."""
    place, sha = Path(path), hashlib.sha256()
    for file in sorted(place.glob("*.safetensors")) if place.is_dir() else [place]:
        size = file.stat().st_size
        sha.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for block in range(_BLOCKS):
                opened.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                sha.update(opened.read(_BLOCK_BYTES))
    return sha.hexdigest()[:16]
