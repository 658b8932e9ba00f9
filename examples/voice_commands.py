"""Speech recognition over WAV files by PocketSphinx: broken files are quarantined.

Needs ``pip install pocketsphinx espeakng-loader``; the latter only speaks the example's input.
"""

import ctypes
import os
import wave
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "voice").absolute()
SPOKEN = {
    "2026-03-01": ["go forward ten meters", "turn left", "stop"],
    "2026-03-02": ["go back two meters", "turn right"],
}
GRAMMAR = """#JSGF V1.0;
grammar moves;
public <move> = go (forward | back) (two | ten) meters | turn (left | right) | stop;
"""
RATE = 16_000


@vd.cls
class Recognizer:
    """Recognizes the sentences of a grammar."""

    def __init__(self, grammar: str) -> None:
        import pocketsphinx

        self.decoder = pocketsphinx.Decoder(samprate=RATE, lm=None, loglevel="FATAL")
        self.decoder.add_jsgf_string("moves", grammar)
        self.decoder.activate_search("moves")

    def transcribe(self, file: vd.File) -> str | None:
        with file.open() as stream, wave.open(stream) as sound:
            samples = sound.readframes(sound.getnframes())
            if len(samples) < sound.getnframes() * sound.getsampwidth():
                raise EOFError("the recording is cut off")  # wave returns what there is
        self.decoder.start_utt()
        self.decoder.process_raw(samples, full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return found.hypstr if found else None


DAYS = dg.StaticPartitionsDefinition(list(SPOKEN))


@dg.asset(partitions_def=DAYS)
def recordings(context: dg.AssetExecutionContext) -> None:
    """The input: a WAV file for each spoken command of a day, and one that was cut off."""
    folder = ROOT / "wav" / context.partition_key
    folder.mkdir(parents=True, exist_ok=True)
    for text in SPOKEN[context.partition_key]:
        path = folder / f"{text.replace(' ', '-')}.wav"
        with wave.open(str(path), "wb") as sound:
            sound.setparams((1, 2, RATE, 0, "NONE", ""))
            sound.writeframes(speak(text).tobytes())
    (folder / "cut.wav").write_bytes(path.read_bytes()[:10_000])


commands = vd.Pipeline(
    "commands",
    source=vd.files(str(ROOT / "wav" / "{partition_key}" / "*.wav"), asset=recordings),
    partitions_def=DAYS,
)
commands.map(
    "transcripts",
    Recognizer(GRAMMAR).transcribe,
    output_column="transcript",
    on_error=vd.Failures("quarantine", max_error_rate=0.5),
)

assets = [recordings, commands.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def speak(text: str) -> np.ndarray:
    """Return a synthetic voice that says a text, as 16-bit samples."""
    import espeakng_loader

    espeak = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = espeak.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
    pieces: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: Any, count: int, _: Any) -> int:
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).astype(np.float32))
        return 0

    espeak.espeak_SetSynthCallback(keep)
    espeak.espeak_SetVoiceByName(b"en-us")
    espeak.espeak_SetParameter(1, 130, 0)  # words a minute
    espeak.espeak_Synth(text.encode(), len(text.encode()) + 1, 0, 0, 0, 1, None, None)
    voice = np.concatenate(pieces)
    resampled = np.interp(np.arange(0, len(voice), rate / RATE), np.arange(len(voice)), voice)
    return resampled.astype(np.int16)


def main() -> None:
    for day in SPOKEN:
        result = dg.materialize(assets, resources=resources, partition_key=day)
        for done in result.asset_materializations_for_node("commands_pipeline"):
            print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
        for row in vd.load(commands["transcripts"], partitions=day, store=store).to_pylist():
            print(f"{day} {Path(row['path']).name}: {row['transcript']}")
        for row in vd.quarantine(commands["transcripts"], partitions=day, store=store).to_pylist():
            print(f"{day} {Path(row['id']).name}: {row['error']}")


if __name__ == "__main__":
    main()
