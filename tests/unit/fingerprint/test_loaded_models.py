"""Models that a module loads on import, found where functions and classes use them."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.loaded_models import LoadedModel, advice, loaded_models
from vane_dagster.fingerprint.values import ValueEncoder, model_class


def library_class(module: str, name: str) -> type:
    """A class with the name that a library's class has."""
    return type(name, (), {"__module__": module})


Module = library_class("torch.nn.modules.module", "Module")
MiniLM = type("SentenceTransformer", (Module,), {"__module__": "sentence_transformers"})
model = MiniLM()
helpers = types.SimpleNamespace(model=None)
not_loaded: Any = None


def uses_it(batch):
    return model(batch)


def by_helper(batch):
    def inner():
        return uses_it(batch)

    return inner()


def by_default(batch, encoder=model):
    return encoder(batch)


def loads_when_called(batch):
    global not_loaded
    not_loaded = not_loaded or MiniLM()
    return not_loaded(batch)


class UsesIt:
    @property
    def size(self):
        return model.size

    def __call__(self, batch):
        return batch


class Loads:
    def __init__(self) -> None:
        self.model = MiniLM()

    def __call__(self, batch):
        return self.model(batch)


def closure():
    local = MiniLM()
    return lambda batch: local(batch)


HERE = LoadedModel("model", "SentenceTransformer", __name__)


@pytest.mark.parametrize(
    "target", [uses_it, by_helper, UsesIt, functools.partial(uses_it), functools.partial(UsesIt)]
)
def test_a_model_of_a_module_is_found_wherever_it_is_used(target):
    assert loaded_models(target) == [HERE]


def test_a_model_that_the_code_itself_holds_is_found():
    assert loaded_models(by_default) == [LoadedModel("encoder", "SentenceTransformer", "")]
    assert loaded_models(closure()) == [LoadedModel("local", "SentenceTransformer", "")]


def test_a_model_of_another_module_is_found_by_its_attribute(monkeypatch):
    import sys

    other = types.ModuleType("other_models")
    other.model = MiniLM()  # type: ignore[attr-defined]  # a module may have any attribute
    monkeypatch.setitem(sys.modules, "other_models", other)
    scope: dict[str, Any] = {"__name__": "user", "other": other}
    exec("def fn(batch):\n    return other.model(batch)", scope)
    found = [LoadedModel("other.model", "SentenceTransformer", "other_models")]
    assert loaded_models(scope["fn"]) == found


@pytest.mark.parametrize("target", [Loads, loads_when_called, len, str.upper])
def test_code_that_loads_its_model_itself_needs_no_advice(target):
    assert loaded_models(target) == []


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


def test_the_advice_says_where_to_load_it():
    text = advice(uses_it, HERE)
    assert (
        f"uses_it uses model, a SentenceTransformer that module {__name__} loads on import" in text
    )
    assert text.endswith("and pass the class in place of uses_it")
    assert advice(UsesIt, HERE).endswith("Load it in UsesIt.__init__, once in each worker")
    factory = advice(uses_it, HERE, is_factory=True)
    assert factory.endswith("Load it in uses_it, once in each worker")


def test_a_loaded_model_among_values_is_refused_with_the_fix():
    with pytest.raises(
        CodeIdentityError, match=r"is a loaded model, a SentenceTransformer.*__init"
    ):
        code_identity(closure())
    encoder = ValueEncoder(lambda value, path: "", LocalFiles())
    with pytest.raises(CodeIdentityError, match=r"fn_kwargs\['model'\] is a loaded model"):
        encoder.digest(model, "fn_kwargs['model']")
