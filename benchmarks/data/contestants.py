"""Ways to feed shuffled batches of tensors, each as its own documentation has it."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from shapes import Shape, collate, padded
from torch.utils.data import DataLoader, Dataset, TensorDataset

CHUNK = 2000


class Contestant(ABC):
    """Writes the rows in its own format, then gives epochs of batches: dicts of tensors with ``x`` and ``id``."""

    name = ""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder / type(self).__name__, shape
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()

    def chunks(self) -> Iterator[dict[str, Any]]:
        """All rows, a part at a time."""
        for start in range(0, self.shape.num_rows, CHUNK):
            yield self.shape.make(start, min(start + CHUNK, self.shape.num_rows))

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows one by one."""
        for chunk in self.chunks():
            for n in range(len(chunk["id"])):
                yield {"x": chunk["x"][n], "id": int(chunk["id"][n])}

    @abstractmethod
    def prepare(self) -> None:
        """Write the data; not timed."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        """The batches of an epoch, shuffled."""


class InMemory(Contestant):
    """All rows as tensors, which contestants share."""

    kept: tuple[str, Any, torch.Tensor] | None = None

    def prepare(self) -> None:
        if InMemory.kept is None or InMemory.kept[0] != self.shape.name:
            InMemory.kept = None
            InMemory.kept = (self.shape.name, *self.made())
        _, self.x, self.ids = InMemory.kept

    def made(self) -> tuple[Any, torch.Tensor]:
        """The rows, and their numbers."""
        ids = torch.arange(self.shape.num_rows)
        if self.shape.is_ragged:
            return [torch.from_numpy(x) for part in self.chunks() for x in part["x"]], ids
        first = self.shape.make(0, 1)["x"]
        x = torch.empty((self.shape.num_rows, *first.shape[1:]), dtype=torch.from_numpy(first).dtype)
        for part in self.chunks():
            x[torch.from_numpy(part["id"])] = torch.from_numpy(part["x"])
        return x, ids


class Bound(InMemory):
    name = "bound: index_select from memory"

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        order = torch.randperm(self.shape.num_rows, generator=torch.Generator().manual_seed(number))
        for places in order.split(self.shape.batch_size):
            if self.shape.is_ragged:
                yield {**padded([self.x[n] for n in places.tolist()]), "id": self.ids.index_select(0, places)}
            else:
                yield {"x": self.x.index_select(0, places), "id": self.ids.index_select(0, places)}


class Items(Dataset[dict[str, Any]]):
    """What a tutorial's dataset is: one item at a time."""

    def __init__(self, x: Any, ids: torch.Tensor) -> None:
        self.x, self.ids = x, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "id": self.ids[index]}


class PerItem(InMemory):
    name = "torch DataLoader, per item, from memory"
    loader_workers = 0

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        torch.manual_seed(number)
        yield from DataLoader(
            Items(self.x, self.ids), batch_size=self.shape.batch_size, shuffle=True, num_workers=self.loader_workers,
            collate_fn=collate if self.shape.is_ragged else None,
        )  # fmt: skip


class PerItemProcesses(PerItem):
    name = "torch DataLoader, per item, 2 processes"
    loader_workers = 2


class Parquet(Contestant):
    """Files that raytrain and Ray read."""

    def prepare(self) -> None:
        writer: pq.ParquetWriter | None = None
        for chunk in self.chunks():
            x = chunk["x"]
            if self.shape.is_ragged:
                column: Any = pa.array(list(x), pa.list_(pa.int32()))
            else:
                column = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(x))
            table = pa.table({"x": column, "id": chunk["id"]})
            writer = writer or pq.ParquetWriter(self.folder / "a.parquet", table.schema, compression="none")
            writer.write_table(table)
        assert writer is not None
        writer.close()


class RaytrainTable(Parquet):
    name = "raytrain.data.parquet"

    def prepare(self) -> None:
        from raytrain.data import Padded, parquet, train_loader

        super().prepare()
        encode = {"x": Padded()} if self.shape.is_ragged else {}
        data = parquet(self.folder / "a.parquet", encode=encode, cache=self.folder / "cache")
        self.loader = train_loader(data, batch_size=self.shape.batch_size, seed=0)

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        for batch in self.loader.batches(number, 0, stop=self.loader.steps_per_epoch):
            yield batch.data


class RaytrainStream(RaytrainTable):
    name = "raytrain.data.parquet_stream"

    def prepare(self) -> None:
        from raytrain.data import Padded, parquet_stream, train_loader

        Parquet.prepare(self)
        encode = {"x": Padded()} if self.shape.is_ragged else {}
        rows = 256 if self.shape.name == "images" else 16_384
        stream = parquet_stream(self.folder / "a.parquet", encode=encode, block_rows=rows)
        self.loader = train_loader(stream, batch_size=self.shape.batch_size, seed=0)


class RaytrainTensors(InMemory):
    name = "raytrain, TensorDataset"

    def prepare(self) -> None:
        from raytrain.data import train_loader

        super().prepare()
        if self.shape.is_ragged:
            raise NotImplementedError("rows of varying length make no TensorDataset")
        self.loader = train_loader(TensorDataset(self.x, self.ids), batch_size=self.shape.batch_size, seed=0)

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        for batch in self.loader.batches(number, 0, stop=self.loader.steps_per_epoch):
            yield {"x": batch.data[0], "id": batch.data[1]}


class HuggingFace(Contestant):
    name = "Hugging Face datasets, torch format"

    def prepare(self) -> None:
        import datasets

        item = {"narrow": None, "images": (3, 224, 224), "tokens": None}[self.shape.name]
        if item:
            feature: Any = datasets.Array3D(item, "uint8")
        elif self.shape.is_ragged:
            feature = datasets.Sequence(datasets.Value("int32"))
        else:
            feature = datasets.Sequence(datasets.Value("float32"), length=64)
        features = datasets.Features({"x": feature, "id": datasets.Value("int64")})
        made = datasets.Dataset.from_generator(
            self.rows, features=features, cache_dir=str(self.folder), writer_batch_size=CHUNK
        )
        self.data = made.with_format("torch")

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        torch.manual_seed(number)
        yield from DataLoader(
            self.data,
            batch_size=self.shape.batch_size,
            shuffle=True,
            collate_fn=collate if self.shape.is_ragged else None,
        )


class RayData(Parquet):
    name = "Ray Data iter_torch_batches, local shuffle"

    def prepare(self) -> None:
        import ray.data

        super().prepare()
        ray.data.DataContext.get_current().enable_progress_bars = False
        self.data = ray.data.read_parquet(str(self.folder / "a.parquet"))

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        size = self.shape.batch_size
        options: dict[str, Any] = {
            "batch_size": size,
            "local_shuffle_buffer_size": 20 * size,
            "local_shuffle_seed": number,
        }
        if self.shape.is_ragged:
            for batch in self.data.iter_batches(**options, batch_format="numpy"):
                yield {
                    **padded([torch.from_numpy(x.copy()) for x in batch["x"]]),
                    "id": torch.from_numpy(batch["id"].copy()),
                }
        else:
            yield from self.data.iter_torch_batches(**options)


class LitData(Contestant):
    name = "LitData StreamingDataset"

    def prepare(self) -> None:
        from litdata.streaming import Cache

        cache = Cache(str(self.folder), chunk_bytes=64 << 20)
        for place, row in enumerate(self.rows()):
            cache[place] = {"x": torch.from_numpy(np.ascontiguousarray(row["x"])), "id": row["id"]}
        cache.done()
        cache.merge(1)

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(self.folder), shuffle=True, seed=number)
        options = {"collate_fn": collate} if self.shape.is_ragged else {}
        yield from StreamingDataLoader(data, batch_size=self.shape.batch_size, **options)


class WebDataset(Contestant):
    name = "WebDataset, buffer of 1,000"

    def prepare(self) -> None:
        import webdataset

        with webdataset.ShardWriter(str(self.folder / "s-%04d.tar"), maxsize=128 << 20, verbose=0) as writer:
            for row in self.rows():
                file = io.BytesIO()
                np.save(file, row["x"])
                writer.write({"__key__": f"{row['id']:09d}", "x.npy": file.getvalue(), "id.cls": row["id"]})

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        import webdataset

        shards = sorted(str(path) for path in self.folder.glob("*.tar"))
        data = (
            webdataset.WebDataset(shards, shardshuffle=len(shards), seed=number, empty_check=False)
            .shuffle(1000)
            .decode()
        )
        data = data.map(lambda row: {"x": torch.from_numpy(row["x.npy"]), "id": row["id.cls"]})
        collated = collate if self.shape.is_ragged else None
        yield from DataLoader(data, batch_size=self.shape.batch_size, collate_fn=collated)


ALL = [
    Bound,
    PerItem,
    PerItemProcesses,
    RaytrainTable,
    RaytrainTensors,
    RaytrainStream,
    HuggingFace,
    RayData,
    LitData,
    WebDataset,
]
