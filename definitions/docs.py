"""The documentation: an ordinary asset that extracts, a pipeline that embeds and publishes.

Dagster inspects the annotations of assets at runtime, so this module does not postpone their
evaluation.
"""

import hashlib
import warnings

import dagster as dg

import vane_dagster as vd
from definitions.embedder import SCHEMA, SentenceEmbedder
from definitions.files import write_parquet
from definitions.settings import PARTITIONS, data_folder
from definitions.stdlib import extract

# Dagster warns at each import of an asset with this parameter.
warnings.filterwarnings("ignore", message="Parameter `backfill_policy`", category=dg.BetaWarning)

GROUP = "stdlib_search"
DATA = data_folder()
packages = dg.StaticPartitionsDefinition(list(PARTITIONS))


@dg.asset(
    partitions_def=packages,
    backfill_policy=dg.BackfillPolicy.single_run(),
    group_name=GROUP,
    kinds={"python", "parquet"},
    description="Docstrings of a top-level package of the standard library, a row for each name.",
)
# Dagster's result is generic in a way that its documentation does not use.
def stdlib_docs(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster's result
    """Extracts the docstrings of each partition's package into a Parquet file."""
    contents = hashlib.sha256()
    for package in context.partition_keys:
        table = extract(package)
        target = DATA / "stdlib" / package / "docs.parquet"
        contents.update(write_parquet(table, target))
        context.add_asset_metadata(
            {"dagster/partition_row_count": table.num_rows, "dagster/uri": str(target)},
            partition_key=package,
        )
    return dg.MaterializeResult(data_version=dg.DataVersion(contents.hexdigest()))


docs = vd.Pipeline(
    "docs",
    source=vd.parquet(f"{DATA}/stdlib/{{partition_key}}/*.parquet", asset=stdlib_docs),
    id="qualname",
    partitions_def=packages,
    group_name=GROUP,
)

clean = docs.project(
    "clean",
    {
        "qualname": "qualname",
        "kind": "kind",
        "signature": "signature",
        "summary": "split_part(trim(doc), chr(10), 1)",
        "text": "qualname || ': ' || split_part(trim(doc), chr(10) || chr(10), 1)",
    },
    where="length(trim(doc)) >= 20 and doc not like 'Alias for field number%'",
    asset=vd.Asset(
        description="Names with a docstring of at least 20 characters. The model reads the first "
        "paragraph only, because details would blur the vector.",
        kinds={"duckdb"},
        # Functions written in C often have no signature: any share of that column may be null.
        checks=[vd.checks.NullRate(0.0, columns=["kind", "summary", "text"])],
    ),
)

embedding = clean.map_batches(
    "embedding",
    SentenceEmbedder,
    schema=SCHEMA,
    columns=["text"],
    batch_size=32,
    asset=vd.Asset(
        description="A vector of length 1 for each text, by all-MiniLM-L6-v2.", kinds={"pytorch"}
    ),
)

enriched = docs.join(
    "enriched",
    clean,
    embedding,
    asset=vd.Asset(description="The texts and their vectors, joined by qualified name."),
)

enriched.write(
    "published",
    f"{DATA}/published/{{partition_key}}",
    asset=vd.Asset(
        description="A plain folder of Parquet files, which `definitions.search` reads.",
        kinds={"parquet"},
    ),
)

assets = [stdlib_docs, docs.build_assets()]

job = dg.define_asset_job(
    "stdlib_search",
    selection=dg.AssetSelection.groups(GROUP),
    description="Extracts, embeds and publishes packages of the standard library.",
)
