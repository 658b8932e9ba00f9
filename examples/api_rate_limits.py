"""An endpoint with OpenAI's API, within its rate limits and a budget.

The key stays in the environment: the stage has only the variable's name. Needs `pip install
'vane-dagster[openai]'` and OPENAI_API_KEY; OPENAI_BASE_URL names another endpoint, such as that of
`vllm serve`, and `VANE_EXAMPLES_API_MODEL` its model.
"""

import os
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "products").absolute()
NAMES = ["a folding bicycle", "a busy coffee machine", "a lamp for reading", "a very quiet fan"]


@dg.asset
def products() -> None:
    """The input: names of products."""
    (ROOT / "products").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(NAMES)), "name": NAMES})
    pq.write_table(table, ROOT / "products" / "all.parquet")


shop = vd.Pipeline("shop", source=vd.parquet(str(ROOT / "products"), asset=products), id="id")
slogans = shop.prompt(
    "slogans",
    "Write a slogan for {name}.",
    provider="openai",
    model=vd.Model(
        os.environ.get("VANE_EXAMPLES_API_MODEL", "gpt-4o-mini"),
        options={
            "base_url": os.environ.get("OPENAI_BASE_URL"),
            "api_key_env": "OPENAI_API_KEY",
            "requests_per_minute": 500,
            "tokens_per_minute": 200_000,
        },
        prices={"prompt": 0.15, "completion": 0.60, "cached": 0.075},  # dollars a million tokens
        cost_budget=0.50,  # dollars, after which a run begins nothing more; the next one continues
    ),
    sampling_params={"temperature": 0, "max_tokens": 40},
    output_column="slogan",
    include_columns=["name"],
    # The workers share the limits. The key goes to them with each run, never stored or logged.
    concurrency=vd.Workers((1, 2), env_vars=["OPENAI_API_KEY"]),
    # HTTP 429, 5xx and lost connections are retried for each row, as Retry-After says.
    on_error=vd.Failures(max_retries=8),
)
slogans.write("published", str(ROOT / "out"))

assets = [products, shop.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("shop_pipeline"):
        facts = {name: value.value for name, value in done.metadata.items()}
        print(done.asset_key.path[-1], "computed:", facts["rows_computed"])
        if done.asset_key == slogans.key:
            print(f"this run cost {facts['cost']:.6f} dollars")
    rows = pq.read_table(ROOT / "out").to_pylist()
    usage = [row["slogan_usage"] for row in rows]
    asked = sum(each["prompt_tokens"] for each in usage)
    print(f"{asked} tokens asked, {sum(each['completion_tokens'] for each in usage)} answered")
    for row in rows:
        print(f"{row['name']}: {row['slogan']} ({row['slogan_usage']['seconds']:.1f} s)")


if __name__ == "__main__":
    main()
