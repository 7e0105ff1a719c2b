"""Bokeh plots to the JSON that the page's script hands to Bokeh, the same bytes at every rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bokeh.document import Document
from bokeh.resources import Resources
from bokeh.themes import Theme

from analyzer.charts.palette import DARK_COLOURS, THEME

DOCUMENT_ID = "run"
ELEMENT_PREFIX = "plot-"


def plots_json(plots: Mapping[str, Any]) -> str:
    """JSON of plots by name, for a script element: documents, where each root goes, and the dark colours.

    Two renderings of the same plots give the same bytes.
    """
    document = Document(theme=Theme(json=THEME), title="")
    with document.models.freeze():  # or every root would be searched again for each one that is added
        for plot in plots.values():
            document.add_root(plot)
    numbers: dict[str, str] = {}
    content = _renumbered(document.to_json(deferred=False), numbers)
    roots = {numbers[plot.id]: ELEMENT_PREFIX + name for name, plot in plots.items()}
    item = {"docid": DOCUMENT_ID, "roots": roots, "root_ids": list(roots)}
    text = json.dumps(
        {"documents": {DOCUMENT_ID: content}, "items": [item], "dark": DARK_COLOURS},
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return text.replace("<", "\\u003c")  # no text of the run can close the script element


def _renumbered(node: Any, numbers: dict[str, str]) -> Any:
    """The same JSON with model ids, which count on through the process, replaced by order of appearance.

    In Bokeh's JSON only a model and a reference to one are objects with an ``id``: the user's own
    mappings are written as lists of entries. Bokeh shares nodes between places: change none in place.
    """
    if isinstance(node, dict):
        return {key: _renumbered_value(key, value, numbers) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_renumbered(value, numbers) for value in node]
    return node


def _renumbered_value(key: str, value: Any, numbers: dict[str, str]) -> Any:
    if key == "id" and isinstance(value, str):
        return numbers.setdefault(value, f"m{len(numbers)}")
    return _renumbered(value, numbers)


def bokeh_script() -> str:
    """BokehJS, core component only, without widgets, tables, WebGL and MathJax."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
