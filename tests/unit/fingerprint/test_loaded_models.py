"""Models that a module loads on import, found among its variables, and models among values."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.loaded_models import models_on_import
from vane_dagster.fingerprint.values import ValueEncoder, model_class


def library_class(module: str, name: str) -> type:
    """A class with the name that a library's class has."""
    return type(name, (), {"__module__": module})


Module = library_class("torch.nn.modules.module", "Module")
MiniLM = type("SentenceTransformer", (Module,), {"__module__": "sentence_transformers"})
model = MiniLM()


def closure():
    local = MiniLM()
    return lambda batch: local(batch)


def test_a_model_among_the_variables_of_a_module_is_named_once(monkeypatch):
    helpers: Any = types.ModuleType("model_helpers")
    helpers.encoder = helpers.same = MiniLM()
    helpers.kind = MiniLM
    user: Any = types.ModuleType("model_user")
    user.encoder = helpers.encoder
    for module in (helpers, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (text,) = models_on_import(["model_helpers", "model_user", "model_not_imported"])
    assert text.startswith("model_helpers.encoder is a SentenceTransformer that is loaded when")
    assert "Load it in the __init__ of a class, once in each worker" in text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers.pipelines.base", "Pipeline"),
        ("keras.src.models.model", "Model"),
        ("onnxruntime.capi.onnxruntime_inference_collection", "InferenceSession"),
    ],
)
def test_models_are_known_by_the_names_of_their_classes(module, name):
    child = type("Child", (library_class(module, name),), {"__module__": "user"})
    assert model_class(child()) == "Child"
    assert model_class(library_class("user", name)()) is None
    assert model_class(child) is None, "a class is no model"


def test_a_module_without_weights_is_no_model():
    class Module(type(model)):  # type: ignore[misc]  # a class made in this test
        def __init__(self, weights):
            self.weights = weights

        def parameters(self):
            return iter(self.weights)

    assert model_class(Module([])) is None
    assert model_class(Module([1.0])) == "Module"
    assert model_class(Module(None)) == "Module", "it raises, so nothing is known"


def test_a_loaded_model_among_values_is_refused_with_the_fix():
    with pytest.raises(
        CodeIdentityError, match=r"is a loaded model, a SentenceTransformer.*__init"
    ):
        code_identity(closure())
    encoder = ValueEncoder(lambda value, path: "", LocalFiles())
    with pytest.raises(CodeIdentityError, match=r"fn_kwargs\['model'\] is a loaded model"):
        encoder.digest(model, "fn_kwargs['model']")
