"""Ordinary assets that read a stage's rows, `vd.load` as in a notebook, and the origin of a row.

A downstream asset chooses the form of its rows by its annotation. They are read through the
manifest in force, so a partition is complete or absent, even while a run writes it.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "orders").absolute()


def estimate(batch: pd.DataFrame) -> dict[str, Any]:
    """How likely an order is returned; put your model here."""
    return {"risk": (batch["price"] / 200).clip(0, 1)}


@dg.asset
def orders() -> None:
    """The input: 100 orders of four customers."""
    (ROOT / "orders").mkdir(parents=True, exist_ok=True)
    table = {
        "id": range(100),
        "customer": ["ann", "bob", "cleo", "dan"] * 25,
        "price": [float(n * (1 + n % 4)) for n in range(100)],
    }
    pq.write_table(pa.table(table), ROOT / "orders" / "all.parquet")


returns = vd.Pipeline("returns", source=vd.parquet(str(ROOT / "orders"), asset=orders), id="id")
priced = returns.project("priced", ["customer", "price"], where="price > 0")
risks = priced.map_batches(
    "risks", estimate, schema={"risk": "DOUBLE"}, columns=["price"], batch_format="pandas"
)
joined = returns.join("joined", priced, risks)

takes_joined = {"joined": dg.AssetIn(joined.key)}


@dg.asset(ins=takes_joined)
def by_customer(joined: pd.DataFrame) -> pd.DataFrame:
    """With pandas. The store also keeps the asset's rows if it is its IO manager."""
    return joined.groupby("customer", as_index=False)["risk"].mean()


@dg.asset(ins=takes_joined)
def risky(joined: ds.Dataset) -> pa.Table:
    """A dataset reads only the requested columns and row groups."""
    return joined.to_table(columns=["id", "customer"], filter=pc.field("risk") > 0.9)


@dg.asset(ins=takes_joined)
def ranked(joined: pl.LazyFrame) -> pl.DataFrame:
    """With Polars, as a query that has not run yet."""
    return joined.sort(["risk", "id"], descending=[True, False]).head(3).collect()


@dg.asset(ins=takes_joined)
def turnover(joined: duckdb.DuckDBPyRelation) -> dg.MaterializeResult[None]:
    """With DuckDB; this one returns no rows, only a number for its metadata."""
    ((total,),) = joined.aggregate("sum(price)").fetchall()
    return dg.MaterializeResult(metadata={"total": total})


assets = [orders, returns.build_assets(), by_customer, risky, ranked, turnover]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store, "io_manager": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("returns_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    print(
        "turnover:", result.asset_materializations_for_node("turnover")[0].metadata["total"].value
    )

    # In a notebook: any stage, and any asset whose rows the store keeps.
    print(vd.load("by_customer", as_=pd.DataFrame, store=store).to_string(index=False))
    print("risky:", vd.load(risky, store=store).num_rows)
    best = vd.load("ranked", as_=pl.DataFrame, store=store)["id"][0]
    print("at most risk:", best)
    print(vd.trace("returns/joined", best, store=store))


if __name__ == "__main__":
    main()
