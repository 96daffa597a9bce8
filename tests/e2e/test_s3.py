"""Data and runs on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import fs

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.data import HashPart, TableDataset, parquet
from raytrain.errors import DataError
from tests.e2e.s3_server import KEY, SECRET, S3Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        s3 = fs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, endpoint_override=f"127.0.0.1:{server.port}", scheme="http", region="us-east-1",
            allow_bucket_creation=True,
        )  # fmt: skip
        s3.create_dir("bkt")
        for year in (2024, 2025):
            x = torch.arange(100 * (year - 2024), 100 * (year - 2023)).double()
            table = pa.table({"x": x.numpy(), "y": (3 * x + 1).numpy(), "id": range(100)})
            pq.write_table(table, f"bkt/table/year={year}/part 0.parquet", row_group_size=30, filesystem=s3)
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))


def test_a_table_is_read_by_uri_glob_and_partition(server: S3Server) -> None:
    whole = parquet(f"s3://bkt/table?{server.query}", where=pc.field("year") == 2025)
    assert len(whole) == 100
    assert whole[3]["x"].tolist() == [103.0]
    assert len(parquet(f"s3://bkt/table/*/part*.parquet?{server.query}")) == 200
    parts = [parquet(f"s3://bkt/table?{server.query}", part=HashPart("id", a, b)) for a, b in ((0, 0.5), (0.5, 1))]
    assert sum(map(len, parts)) == 200
    assert whole.describe()["source"] == "s3://bkt/table"


@pytest.mark.parametrize("place", ["bkt/none", "nobucket/x", "bkt/table/*.csv"])
def test_what_is_not_there_is_named(server: S3Server, place: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|no parquet files at"):
        parquet(f"s3://{place}?{server.query}")


def test_a_wrong_key_is_told_and_not_shown(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    with pytest.raises(DataError, match=r"cannot be read|does not exist") as caught:
        parquet(f"s3://bkt/table?{server.query}")
    assert "wrong-secret-key" not in str(caught.value)


@dataclass(frozen=True)
class Line(raytrain.Task):
    uri: str = ""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1).double()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-5)

    def train_data(self) -> TableDataset:
        return parquet(self.uri, columns=["x", "y"])

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        return (model(batch["x"][:, None]).squeeze(1) - batch["y"]).pow(2).mean()


def run(server: S3Server, name: str, steps: int) -> raytrain.Result:
    return raytrain.fit(
        Line(f"s3://bkt/table?{server.query}"),
        train=TrainConfig(steps=steps, batch_size=20, checkpoint_every="2st", log_every="1st"),
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(name=name, storage=f"s3://bkt/runs?{server.query}"),
        tracking=TrackingConfig(mlflow=False, progress=False),
    )


def test_a_run_on_s3_resumes_to_the_same_weights(server: S3Server) -> None:
    whole = run(server, "whole", 15)
    run(server, "parts", 7)
    parts = run(server, "parts", 15)
    assert parts.step == 15
    assert [row.step for row in parts.history] == list(range(1, 16))
    a, b = whole.load_model().state_dict(), parts.load_model().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
