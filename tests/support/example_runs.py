"""Runs the examples as a reader does, and checks their output."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from support import forked
from support.llm_server import KEY, Server
from support.paths import REPOSITORY
from vane_dagster.compute.local_head import LocalHead

EXAMPLES = REPOSITORY / "examples"

# The output of an example besides its counts, as a pattern over the whole output.
PRINTED = {
    "api_rate_limits": r"cost 0\.0000\d\d dollars.*31 tokens asked, 35 answered.*"
    r"a very quiet fan: echo: ",
    "async_api": r"'german': 'gut Morgen 0'.*'german': 'gut Nacht 1'",
    "batch_api": r"cost 0\.0000\d0 dollars.*3 requests in batches.*Where is my parcel\? -> echo: ",
    "caption_images": r"forest\.jpg: echo: Write a caption .*\[image/jpeg 320x240\].*"
    r"sea\.jpg: .*\[image/jpeg 300x200\].*sunset\.jpg: .*\[image/jpeg 379x252\].*"
    r"broken\.jpg: .*not an image in a format",
    "checks": r"monday: rated/drift_stars passed.*monday: rated/stars_are_few passed.*"
    r"tuesday: rated/drift_stars WARN: .* 'monday' .*tuesday: rated/golden passed",
    "chunks": r"kettle: 4 chunks, .*'kettle-0', 'sentence': 'Fill the kettle.*"
    r"found in radio-1 of radio: Turn the left knob",
    "classify_labels": r"golden passed.*no_label_takes_all passed.*question +Do you deliver to",
    "cpu_preprocess": r"urgency 2: please reply today \(3 words\).*urgency 6: server down",
    "csv_to_delta": r"2026-05-04: 65 payments look like fraud.*2026-05-05: 59 payments",
    "extract_fields": r"desk lamp, new: 45\.00 euros.*piano, used: 600\.00 euros.*"
    r"no offer in advert 3: .*The answer is not JSON.*The answer: A cat is not for sale",
    "hf_image_classification": r"red looks like red.*navy looks like blue",
    "hf_text_classification": r"POSITIVE \(\d\.\d\d\): I love this kettle.*NEGATIVE .*: I want my",
    "hf_zero_shot": r"delivery: The parcel never came.*payment: My card.*delivery: Where is",
    "keras_model": r"1\.52 from the centre: inside 0\.0.*1\.46 from the centre: inside 0\.0",
    "onnx_model": r"wine 0 is of grape 0 \(\d\.\d\d\).*wine 160 is of grape 2",
    "own_provider": r"3 lamps to Rome.*7 desks to Paris.*"
    r"quarantined, id 2: The answer is not JSON.*cost 0\.0",
    "photo_labels": r"blue\.jpg: blue.*red\.jpg: red.*broken\.jpg: not an image",
    "voice_commands": r"go-forward-ten-meters\.wav: go forward ten meters.*stop\.wav: stop.*"
    r"2026-03-01 cut\.wav: EOFError.*2026-03-02 turn-right\.wav: turn right",
    "pdf_search": r"2026-05-04 toaster\.pdf: PdfStreamError: .*2026-05-05 toaster\.pdf: .*"
    r"How do I clean the kettle\? kettle\.pdf, page 2: Remove limescale",
    "partitioned": r"2026-01-05 strangest: .*'anomaly': 3\.37",
    "prompt_pre_and_postprocess": r"May I return the lamp\? -> echo: May I return the lamp\? "
    r"\(6 words\).*quarantined, id 2: the question is empty",
    "read_outputs": r"turnover: \d+\.0.* ann +0\.2.* dan +0\.7.*risky: \d+.*at most risk: 51\b.*"
    r"returns/source +id 51.*returns/risks +id 51; map_batches of priced.*returns/joined",
    "reproducible": r"priced computed: \d.*reproducible passed: 20 rows computed again.*"
    r"reproducible failed: \d+ of 20 rows .* ids \d+.*id \d+: euros is stored as \d+\.\d+, now",
    "row_reuse": r"first run \['blue', 'green', 'red'\]\s+one row changed \['pink'\]\s+reordered, "
    r"a new id, a new row \['gold'\]\s+the same after trim \[\]\s+a row twice \[\]\s+"
    r"back again \['green'\]",
    "sentence_transformer": r"The parcel arrived two days late\. +is most like: Delivery took far",
    "sklearn_function": r"iris-000 is a setosa \(9\d%\).*iris-120 is a virginica",
    "summarise_vllm": r"\d+ tokens read, [1-9]\d?% of them from the engine's cache.*2026-03-03 2: ",
    "test_my_pipeline": r"3 passed.*rated computed",
    "torch_numpy": r"1\.52 from the centre: inside 0\.0.*1\.46 from the centre: inside 0\.0",
    "xgboost_model": r"income \d+\.\d, debt \d+\.\d: risk 0\.0.*: risk 1\.0",
    "transcribe_audio": r"2026-03-01 high\.wav: echo: \[audio/wav, 8044 bytes\]\s+Transcribe this.*"
    r"2026-03-01 broken\.wav: .*of another type than.*2026-03-02 middle\.wav: echo: ",
    "two_prompts_one_engine": r"(content|neutral|angry) +After two weeks the handle broke.* -> ",
    "two_models": r"delivery \(0\.\d\d\): My package never arrived.*account +\(.*product +\(",
}
ON_VLLM = ("summarise_vllm", "two_prompts_one_engine")
ON_MODELS = (
    *ON_VLLM,
    "classify_labels",
    "extract_fields",
    "pdf_search",
    "sentence_transformer",
    "two_models",
)
"""Examples that load a model, for tests of the tier "providers"."""
ON_FRAMEWORKS = {
    "csv_to_delta": "xgboost",
    "hf_image_classification": "transformers",
    "hf_text_classification": "transformers",
    "hf_zero_shot": "transformers",
    "keras_model": "tensorflow",
    "onnx_model": "onnxruntime",
    "photo_labels": "transformers",
    "voice_commands": "pocketsphinx",
    "xgboost_model": "xgboost",
}
"""Examples that call a framework, for tests of the same tier, with the module that they need."""


@pytest.fixture(scope="module")
def example_cluster(
    tmp_path_factory: pytest.TempPathFactory, endpoint: tuple[Server, str]
) -> Iterator[dict[str, str]]:
    """One cluster and one data folder for all examples, separate from the user's own."""
    with tempfile.TemporaryDirectory(prefix="vx-", dir="/tmp") as home:
        variables = {
            **os.environ,
            "VANE_DAGSTER_HOME": home,
            "VANE_EXAMPLES": str(tmp_path_factory.mktemp("examples")),
            "OPENAI_BASE_URL": endpoint[1],
            "OPENAI_API_KEY": KEY,
            "VLLM_CPU_CI_ENV": "1",  # compile little
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DAGSTER_DISABLE_TELEMETRY": "1",
        }
        yield variables
        LocalHead(home=home).stop()


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # backfill_policy= of assets
        spec.loader.exec_module(module)
    return module


def run(name: str, environment: dict[str, str]) -> tuple[str, list[int]]:
    program = [str(EXAMPLES / f"{name}.py")]
    done = forked.run(program, environment, EXAMPLES.parent, 240, forked.EXAMPLE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, [int(n) for n in re.findall(r"computed: (\d+)", done.stdout)]


def runs_twice(name: str, environment: dict[str, str]) -> str:
    """Run an example twice: the second run prints the same, and computes nothing."""
    printed, computed = run(name, environment)
    assert re.search(PRINTED[name], printed, re.DOTALL), printed
    if name == "row_reuse":  # it runs its pipeline six times, in a new folder
        return printed
    assert computed, printed
    assert all(computed), printed
    if name.startswith("test_"):
        return printed

    again, nothing = run(name, environment)
    assert re.search(PRINTED[name], again, re.DOTALL), again
    assert nothing == [0] * len(computed), again
    return printed
