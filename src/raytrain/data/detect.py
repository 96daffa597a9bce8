"""Iterable data: what counts as such, and whether it deals its samples to the ranks by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from raytrain.data.source import own_iteration

_MOST_PARTS = 200  # objects looked at within a dataset: what it wraps is near
_ALWAYS = {  # classes that read the rank from their surroundings, by top-level package
    "litdata": {"StreamingDataset", "CombinedStreamingDataset", "ParallelStreamingDataset"},
    "streaming": {"StreamingDataset"},
    "webdataset": {"ResampledShards"},
}


def is_iterable(data: Any) -> bool:
    """Whether data is iterated, and not asked for single items."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return isinstance(dataset, IterableDataset) or _is_of_hugging_face(dataset)


def shards_itself(data: Any) -> bool:
    """Whether iterable data, or something that it wraps, deals samples to ranks by itself in a way that is known."""
    return any(_deals(part) for part in parts_of(data))


def brings_batches(data: Any) -> bool:
    """Whether what is iterated yields batches: a loader other than torch's own, or torch's with ``batch_size=None``."""
    if any(kind.__name__ == "WebLoader" and kind.__module__.startswith("webdataset") for kind in type(data).__mro__):
        return True  # a dataset in name only
    if isinstance(data, DataLoader):
        return data.batch_size is None or bool(own_iteration(data)) or not is_iterable(data)
    return not is_iterable(data)


def parts_of(data: Any) -> Iterator[Any]:
    """The data and what it is made of: datasets, loaders, pipelines, samplers."""
    seen: set[int] = set()
    waiting = [data]
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for value in list(getattr(part, "__dict__", {}).values()):
            inside = value if isinstance(value, (list, tuple)) else [value]
            waiting += [v for v in inside[:_MOST_PARTS] if _is_part(v)]


def _is_part(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__.partition(".")[0]
    return hasattr(value, "__iter__") or callable(value) or module in ("datasets", "torchdata", *_ALWAYS)


def _deals(part: Any) -> bool:
    """The marks of Hugging Face datasets, webdataset, litdata, mosaicml streaming and torch's own sampler."""
    for kind in type(part).__mro__:
        if kind.__name__ in _ALWAYS.get(kind.__module__.partition(".")[0], ()):
            return True
    if _is_of_hugging_face(part):
        return getattr(part, "_distributed", None) is not None  # split_dataset_by_node was called
    if getattr(part, "__name__", "") == "split_by_node" and getattr(part, "__module__", "").startswith("webdataset"):
        return True
    return hasattr(part, "num_replicas") and hasattr(part, "rank")  # a DistributedSampler, in torchdata's nodes say


def _is_of_hugging_face(part: Any) -> bool:
    return any(
        kind.__name__ == "IterableDataset" and kind.__module__.startswith("datasets.") for kind in type(part).__mro__
    )
