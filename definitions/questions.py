"""What people asked, embedded day by day: a daily-partitioned pipeline with a job and a schedule.

Its assets are those of the component in `defs/questions`.

No Dagster asset writes its source: each `definitions.search` leaves a file. So the source is
observed, and Dagster knows which days have new questions. Its model has the same class and
arguments as that of the pipeline `docs`, so both use the same warm workers.

Dagster inspects the annotations of schedules at runtime, so this module does not postpone their
evaluation.
"""

from datetime import UTC, timedelta

import dagster as dg

import vane_dagster as vd
from definitions.asked import day_folder
from definitions.embedder import SCHEMA, SentenceEmbedder
from definitions.settings import data_folder

TEXT = r"trim(regexp_replace(question, '\s+', ' ', 'g'))"

questions = vd.Pipeline(
    "questions",
    source=vd.parquet(f"{day_folder('{partition_key}')}/*.parquet"),
    id="id",
    # Today is a partition too. Another run of it computes only the questions asked since.
    partitions_def=dg.DailyPartitionsDefinition("2026-01-01", timezone="UTC", end_offset=1),
)

clean = questions.project(
    "clean",
    {"asked_at": "asked_at", "text": TEXT, "answer": "answer", "score": "score"},
    where=f"{TEXT} <> ''",
    asset=vd.Asset(
        description="Questions that are not empty, each with its best answer and the score.",
        kinds={"duckdb"},
    ),
)

embedding = clean.map_batches(
    "embedding",
    SentenceEmbedder,
    schema=SCHEMA,
    columns=["text"],
    batch_size=32,
    asset=vd.Asset(
        description="A vector of length 1 for each question, by the model of docs/embedding.",
        kinds={"pytorch"},
    ),
)

enriched = questions.join(
    "enriched",
    clean,
    embedding,
    asset=vd.Asset(description="The questions and their vectors, joined by id."),
)

enriched.write(
    "published",
    f"{data_folder()}/published_questions/{{partition_key}}",
    asset=vd.Asset(
        description="A plain folder of Parquet files for each day, for analyses.",
        kinds={"parquet"},
    ),
)

job = dg.define_asset_job(
    "daily_questions",
    selection=[stage.key for stage in questions],
    description="Embeds and publishes the questions of a day.",
)


@dg.schedule(
    name="daily_questions_schedule",
    job=job,
    cron_schedule="0 1 * * *",
    execution_timezone="UTC",
    description="Each night, the questions of the day that has ended.",
)
def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
    """Request the day before, if anyone asked a question on it."""
    now = context.scheduled_execution_time.astimezone(UTC)
    day = f"{now - timedelta(days=1):%Y-%m-%d}"
    if not any(day_folder(day).glob("*.parquet")):
        return dg.SkipReason(f"nobody asked anything on {day}")
    return dg.RunRequest(run_key=day, partition_key=day)
