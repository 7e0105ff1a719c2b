"""Bokeh's models, typed as Any: its own annotations are incomplete (3.9 refuses ``Range1d(0, 1)`` and has no
``ColorBar``), so that checking against them would report what is right."""

from typing import Any

import bokeh.models as _models

models: Any = _models
BokehModel = Any
