"""Recordings transcribed day by day by an audio model behind OpenAI's API.

The rows name files; the workers read them and send their content. Needs `pip install
'vane-dagster[openai]'` and OPENAI_API_KEY; OPENAI_BASE_URL names another endpoint, such as that of
`vllm serve`, and `VANE_EXAMPLES_AUDIO_API_MODEL` its model.
"""

import os
import wave
from pathlib import Path

import dagster as dg
import numpy as np

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "recordings").absolute()
TONES = {"2026-03-01": {"low": 220, "high": 880}, "2026-03-02": {"middle": 440}}
RATE = 16_000
DAYS = dg.StaticPartitionsDefinition(list(TONES))


@dg.asset(partitions_def=DAYS)
def recordings(context: dg.AssetExecutionContext) -> None:
    """The input: WAV files of a day, here of a tone each, and one that is none."""
    folder = ROOT / "wav" / context.partition_key
    folder.mkdir(parents=True, exist_ok=True)
    for name, hertz in TONES[context.partition_key].items():
        samples = 8_000 * np.sin(np.arange(RATE // 4) * hertz * 2 * np.pi / RATE)
        with wave.open(str(folder / f"{name}.wav"), "wb") as sound:
            sound.setparams((1, 2, RATE, 0, "NONE", ""))
            sound.writeframes(samples.astype(np.int16).tobytes())
    (folder / "broken.wav").write_bytes(b"no sound")


calls = vd.Pipeline(
    "calls",
    source=vd.files(str(ROOT / "wav" / "{partition_key}" / "*.wav"), asset=recordings),
    partitions_def=DAYS,
)
transcripts = calls.prompt(
    "transcripts",
    [
        {"role": "system", "content": "You transcribe recordings. Answer with their words alone."},
        {"role": "user", "content": [vd.audio("path"), "Transcribe this recording."]},
    ],
    provider="openai",
    model=vd.Model(
        os.environ.get("VANE_EXAMPLES_AUDIO_API_MODEL", "gpt-audio-mini"),
        options={"base_url": os.environ.get("OPENAI_BASE_URL")},
    ),
    sampling_params={"temperature": 0, "max_tokens": 1000},
    output_column="transcript",
    concurrency=vd.Workers(env_vars=["OPENAI_API_KEY"]),
    on_error=vd.Failures("quarantine", max_error_rate=0.5),
)

assets = [recordings, calls.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    for day in TONES:
        result = dg.materialize(assets, resources=resources, partition_key=day)
        for done in result.asset_materializations_for_node("calls_pipeline"):
            print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
        for row in vd.load(transcripts, partitions=day, store=store).to_pylist():
            print(f"{day} {Path(row['path']).name}: {row['transcript']}")
        for row in vd.quarantine(transcripts, partitions=day, store=store).to_pylist():
            print(f"{day} {Path(row['id']).name}: {row['message']}")


if __name__ == "__main__":
    main()
