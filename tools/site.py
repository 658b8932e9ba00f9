"""A hook of mkdocs: pages of the repository outside `docs`, and the reference.

The README is the site's first page. Pages link to each other as in the repository; here links are
translated to those of the site, and a link to a file that the site does not have is its text alone.
Each example is a page with its code.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File  # type: ignore[import-not-found,unused-ignore]  # in the extra `docs`

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
    "benchmarks/README.md": "benchmarks/index.md",
}
"""Pages outside `docs`, with their places on the site."""
REFERENCE = {
    "pipelines": "Pipeline Stage PipelineComponent func cls method",
    "sources": (
        "parquet table csv json text files images delta iceberg lance huggingface ray_dataset "
        "stored row_id File"
    ),
    "options": "Asset Children Failures Model Reuse Workers image audio document tensor local_file",
    "compute": "LocalCompute RayCompute LocalCluster Server VLLMServer TritonServer",
    "results": "FragmentStore load trace quarantine diff",
}
"""The public names on each page of the reference."""
METHODS = {
    "Pipeline": "inherited_members: true",
    "Stage": "inherited_members: true",
    "PipelineComponent": "inherited_members: false",
    "File": "inherited_members: false",
    "Check": "members: [evaluate]",
}
"""The classes whose methods are for users, and which of them."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    for example in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=text))
    for notebook in sorted((ROOT / "examples/notebooks").glob("*.ipynb")):
        files.append(
            File.generated(config, f"examples/{notebook.stem}.md", content=_cells(notebook))
        )
    for place, text in _reference():
        files.append(File.generated(config, f"reference/{place}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate links, except in code."""
    place = page.file.src_uri
    repository = {to: path for path, to in PAGES.items()}.get(place, f"docs/{place}")

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        to = _place(posixpath.normpath(posixpath.join(posixpath.dirname(repository), path)))
        if to is None:
            return text
        to = posixpath.relpath(to, posixpath.dirname(place) or ".")
        return f"{image}[{text}]({to}{'#' * bool(anchor)}{anchor})"

    if place.startswith(("reference/", "examples/")) and place != "examples/index.md":
        return markdown
    pieces, start = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(link, markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*pieces, _LINK.sub(link, markdown[start:])])


def _place(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it does not."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith((".py", ".ipynb")):
        return f"examples/{posixpath.splitext(posixpath.basename(path))[0]}.md"
    return None


def _reference() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference: every public name, and every command."""
    import vane_dagster as vd

    listed = {name for names in REFERENCE.values() for name in names.split()}
    public = {name for name in vd.__all__ if not name.startswith("__")} - {"checks", "errors"}
    if listed != public:
        raise ValueError(f"REFERENCE lacks {public - listed}, or has too many: {listed - public}")
    titles = {"pipelines": "Pipelines and stages", "sources": "Sources",
              "options": "Options of stages", "compute": "Compute and servers",
              "results": "Stores and results"}  # fmt: skip
    index = ["# Reference\n", "All public names of `vane_dagster`, here as `vd`.\n"]
    for page, names in REFERENCE.items():
        objects = [(name, getattr(vd, name)) for name in names.split()]
        yield page, "\n".join([f"# {titles[page]}\n", *(_block(*each) for each in objects)])
        links = ", ".join(f"[`vd.{n}`]({page}.md#{o.__module__}.{n})" for n, o in objects)
        index.append(f"- **{titles[page]}**: {links}")
    for page, module in (("checks", vd.checks), ("errors", vd.errors)):
        own = [
            (name, found)
            for name in getattr(module, "__all__", dir(module))
            if name[0].isupper()
            and getattr(found := getattr(module, name), "__module__", "").startswith("vane_")
        ]
        yield page, "\n".join([f"# {page.capitalize()}\n", *(_block(*each) for each in own)])
        index.append(f"- **{page.capitalize()}**: [`vd.{page}`]({page}.md)")
    yield "index", "\n".join([*index, "- **Commands**: [`vane-dagster`](commands.md)\n"])
    yield "commands", "\n".join(["# Commands\n", *_commands()])


def _cells(notebook: Path) -> str:
    """Return a notebook's cells and outputs as a page."""
    page = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        page.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            html, text = ("".join(shown.get(kind, "")) for kind in ("text/html", "text/plain"))
            wide = f'<div style="overflow-x: auto">{html}</div>'
            page.append(wide if html else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(page)


def _block(name: str, documented: Any) -> str:
    """Return what mkdocstrings replaces by the documentation of an object."""
    options = METHODS.get(name, "members: false")
    fields = getattr(documented, "model_fields", {})
    if fields:
        options += "\n      separate_signature: false\n      show_signature: false"
    block = f"::: {documented.__module__}.{name}\n    options:\n      {options}\n"
    described = [
        f"- **`{field}`** (default: `{value.get_default(call_default_factory=True)!r}`): "
        f"{value.description}"
        for field, value in fields.items()
        if value.description
    ]
    return "\n".join([block, *(["**Fields:**\n"] if described else []), *described, ""])


def _commands() -> Iterator[str]:
    """Yield the help of each command."""
    from vane_dagster.cli.main import main

    def walk(command: click.Command, path: list[str], parent: click.Context | None) -> Any:
        context = click.Context(command, info_name=path[-1], parent=parent)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found, [*path, name], context)
        else:
            yield f"## {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"

    yield from walk(main, ["vane-dagster"], None)
