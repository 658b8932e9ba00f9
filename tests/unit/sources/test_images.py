"""Decoding of images, and files that are none."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import vane_dagster as vd
from support import ingested
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.sources.images import ImagesSource


def picture(height: int = 6, width: int = 4, mode: str = "RGB") -> Image.Image:
    values = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    return Image.fromarray(values).convert(mode)


def read(source: ImagesSource, columns: list[str] | None = None) -> pa.Table:
    # A hash of the temporary path may divide the files.
    return ingested.read(source, columns=columns).sort_by("path")


def arrays(table: pa.Table) -> np.ndarray:
    return table["image"].combine_chunks().to_numpy_ndarray()


def test_images_are_resized_like_pillow_does(tmp_path):
    picture(30, 20).save(tmp_path / "a.png")
    found = read(vd.images(str(tmp_path), size=(7, 5)))
    expected = picture(30, 20).resize((5, 7), Image.Resampling.BILINEAR)
    assert np.array_equal(arrays(found)[0], np.asarray(expected))


@pytest.mark.parametrize(
    ("mode", "shape"), [("L", (6, 4)), ("RGB", (6, 4, 3)), ("RGBA", (6, 4, 4))]
)
@pytest.mark.parametrize("stored", ["L", "RGB", "RGBA", "P", "CMYK"])
def test_modes_are_converted(tmp_path, mode, shape, stored):
    picture(mode=stored).save(tmp_path / "a.tiff")
    found = arrays(read(vd.images(str(tmp_path), size=(6, 4), mode=mode)))
    assert found.shape == (1, *shape)
    with Image.open(tmp_path / "a.tiff") as image:
        assert np.array_equal(found[0], np.asarray(image.convert(mode)))


def test_16_bits_are_scaled_to_8(tmp_path):
    values = np.array([[0, 257], [32896, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    found = arrays(read(vd.images(str(tmp_path), size=(2, 2), mode="L")))
    assert found[0].tolist() == [[0, 1], [128, 255]]


def broken(folder) -> list[str]:
    picture().save(folder / "good.png")
    encoded = io.BytesIO()
    picture(40, 40).save(encoded, "jpeg")
    (folder / "cut.jpg").write_bytes(encoded.getvalue()[: len(encoded.getvalue()) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_bytes(b"no image")
    picture(50, 50).save(folder / "large.png")
    return ["cut.jpg", "empty.png", "large.png", "text.png"]


def test_files_that_are_no_images_are_row_errors(tmp_path):
    names = broken(tmp_path)
    source = vd.images(str(tmp_path), size=(6, 4), max_pixels=2000)
    table = read(source)
    found = {row["path"].rpartition("/")[2]: row for row in table.to_pylist()}
    assert [name for name, row in found.items() if row[ROW_ERROR]] == names
    assert "Truncated" in found["cut.jpg"][ROW_ERROR]["message"]
    assert found["empty.png"][ROW_ERROR]["message"] == "the image file is empty"
    assert "not an image in a format" in found["text.png"][ROW_ERROR]["message"]
    assert "50 x 50 are 2500 pixels, more than max" in found["large.png"][ROW_ERROR]["message"]
    assert found["large.png"][ROW_ERROR]["error"] == "DecompressionBombError"
    assert np.array_equal(np.reshape(found["good.png"]["image"], (6, 4, 3)), np.asarray(picture()))
    assert all(found[name]["image"] is None for name in names)


def test_without_a_size_only_headers_are_read(tmp_path):
    picture(40, 40).save(tmp_path / "cut.bmp")
    whole = (tmp_path / "cut.bmp").read_bytes()
    (tmp_path / "cut.bmp").write_bytes(whole[: len(whole) // 2])
    (row,) = read(vd.images(str(tmp_path))).to_pylist()
    assert (row["image"], row["width"]) == (whole[: len(whole) // 2], 40)
    picture().save(tmp_path / "good.png")
    errors = read(vd.images(str(tmp_path), size=(6, 4))).column(ROW_ERROR).to_pylist()
    assert [error is None for error in errors] == [False, True]


def test_the_limit_of_pixels_replaces_that_of_pillow(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    picture(50, 50).save(tmp_path / "large.png")
    assert ROW_ERROR not in read(vd.images(str(tmp_path), size=(6, 4))).column_names


def test_nothing_is_decoded_for_paths_alone(tmp_path):
    broken(tmp_path)
    table = read(vd.images(str(tmp_path), size=(6, 4)), ["path"])
    assert table.column_names == ["path"]
    assert table.num_rows == 5


def test_of_a_folder_files_with_names_of_images_are_read(tmp_path):
    for name in ("a.png", "b.JPG", "c.txt", "d"):
        picture().save(tmp_path / name, "png")
    source = vd.images(str(tmp_path), size=(6, 4))
    paths = read(source)["path"].to_pylist()
    assert sorted(paths) == [str(tmp_path / "a.png"), str(tmp_path / "b.JPG")]
    assert read(vd.images(f"{tmp_path}/*", size=(6, 4))).num_rows == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no image file"):
        read(vd.images(str(tmp_path / "empty")))


def test_options_change_the_identity_of_fragments(tmp_path):
    picture().save(tmp_path / "a.png")

    def identity(**options) -> str:
        return ingested.split(vd.images(str(tmp_path), **options)).fragments[0].identity

    found = [
        identity(),
        identity(size=(6, 4)),
        identity(size=(6, 4), mode="L"),
        identity(size=(6, 4), max_pixels=10),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 224}, r"size is 224; expected height and width"),
        ({"mode": "rgb"}, "mode is 'rgb'; expected"),
        ({"max_pixels": 0}, "max_pixels"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(DefinitionError, match=words):
        vd.images("/data", **options)
