"""Transport ``process_group``: packs slices into messages (buckets), in an order that both ends know.

The engine worker plans and sends the lists of slices; after that only weights go over a link. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rpg_megatron.bridge.manifest import Manifest, PublishedBox
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.dtypes import ITEM_BYTES

ALIGNMENT = 64
"""Byte alignment of parts in a bucket, so that any element type can be viewed in place."""


@dataclass(frozen=True)
class BucketPart:
    """A box of an HF tensor that one trainer rank holds, small enough for a bucket."""

    hf_name: str
    box: Box
    nbytes: int

    @property
    def padded_nbytes(self) -> int:
        """Bytes in a bucket, including padding."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


Bucket = tuple[BucketPart, ...]
"""Consecutive parts that are sent as one message."""


def exclusive_bytes(manifest: Manifest, wanted: Iterable[tuple[str, Box]]) -> Counter[int]:
    """Index of a shard -> number of bytes of a worker's reads that only this shard holds."""
    nbytes: Counter[int] = Counter()
    for name, box in wanted:
        for published in manifest.tensors[name].boxes:
            common = None if published.shared_with else published.hf.intersect(box)
            if common is not None:
                nbytes[published.shard] += ITEM_BYTES[manifest.tensors[name].dtype] * common.numel
    return nbytes


def choose_shard(published: PublishedBox, exclusive: Counter[int]) -> int:
    """The shard to read a box from: of those that hold it, the one with the most ``exclusive_bytes``."""
    return max((published.shard, *published.shared_with), key=lambda shard: (exclusive[shard], -shard))


def split_box(
    manifest: Manifest, hf_name: str, wanted: Box, max_bytes: int, exclusive: Counter[int]
) -> Iterator[tuple[int, BucketPart]]:
    """Cut a box by rows into (index of the shard to read from, part) of at most ``max_bytes`` each.

    A row is never split, so a part of one row may be larger. exclusive: the worker's ``exclusive_bytes``.
    """
    tensor = manifest.tensors[hf_name]
    item = ITEM_BYTES[tensor.dtype]
    for published in tensor.boxes:
        common = published.hf.intersect(wanted)
        if common is None:
            continue
        shard = choose_shard(published, exclusive)
        rows = common.extent[0] if common.extent else 1
        step = max(1, max_bytes * rows // max(item * common.numel, 1))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            start = (common.start[0] + row, *common.start[1:]) if common.extent else ()
            box = Box(start, (count, *common.extent[1:]) if common.extent else ())
            yield shard, BucketPart(hf_name, box, item * math.prod(box.extent))


def plan_streams(
    manifest: Manifest, wanted: Iterable[tuple[str, Box]], max_bytes: int, exclusive: Counter[int]
) -> dict[int, list[Bucket]]:
    """Index of a shard -> the buckets that its rank sends for a worker's reads, in the order of the reads.

    max_bytes: size of a bucket; a larger part has a bucket of its own. exclusive: ``exclusive_bytes`` of the
    reads.
    """
    streams: dict[int, list[list[BucketPart]]] = {}
    used: dict[int, int] = {}
    for name, box in wanted:
        for shard, part in split_box(manifest, name, box, max_bytes, exclusive):
            buckets = streams.setdefault(shard, [])
            if not buckets or used[shard] + part.padded_nbytes > max_bytes:
                buckets.append([])
                used[shard] = 0
            buckets[-1].append(part)
            used[shard] += part.padded_nbytes
    return {shard: [tuple(b) for b in buckets] for shard, buckets in streams.items()}


def message_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's message."""
    return sum(p.padded_nbytes for p in bucket)


def largest(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest message."""
    return max(map(message_bytes, buckets), default=0)
