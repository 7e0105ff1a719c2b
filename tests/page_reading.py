"""Reading a page in a browser, and driving it with real mouse and touch input.

The JavaScript here only reads: ``evaluate`` runs outside the page's Content-Security-Policy, so that
causing things with it would hide a violation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Page = Any  # playwright is imported by the tests that need it, when it is there

STRIP = "strip"  # the range of marks along the top edge

PIXELS = """
(name) => {
  const canvases = [];
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.tagName === "CANVAS") canvases.push(element);
      if (element.shadowRoot) walk(element.shadowRoot);
    }
  };
  walk(document.getElementById("plot-" + name));
  const counts = {};
  let hash = 0;
  for (const canvas of canvases.filter((c) => c.width > 0)) {
    // A copy that is made for reading: reading the page's own canvas back makes Chromium warn.
    const blank = new OffscreenCanvas(canvas.width, canvas.height);
    const copy = blank.getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    for (let i = 0; i < data.length; i += 4) {
      hash = (hash * 31 + data[i] + 7 * data[i + 1] + 13 * data[i + 2] + 17 * data[i + 3]) | 0;
      if (data[i + 3] >= 96) {
        const hex = [data[i], data[i + 1], data[i + 2]].map((v) => v.toString(16).padStart(2, "0"));
        const colour = "#" + hex.join("");
        counts[colour] = (counts[colour] ?? 0) + 1;
      }
    }
  }
  return { counts, hash };
}
"""
STEPS_SHOWN = (
    """() => { const r = Bokeh.documents[0].get_model_by_name("steps"); return [r.start, r.end]; }"""
)
PLACE = """
([chart, step, value, range]) => {
  const plot = Bokeh.documents[0].roots().find((p) => p.name === chart);
  const { frame } = Bokeh.index.find_one(plot);
  return [frame.x_scale.compute(step), frame.y_scales.get(range).compute(value)];
}
"""
LOW_CONTRAST = """
() => {
  const parse = (text) => {
    const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], alpha: a ?? 1 };
  };
  const luminance = (rgb) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const { rgb, alpha } = parse(getComputedStyle(e).backgroundColor);
      if (alpha > 0) return rgb;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim() !== "");
    if (!own || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    if (!element.checkVisibility()) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color).rgb), luminance(background(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low.push([element.tagName, element.className, contrast]);
  }
  return low;
}
"""


def drag(page: Page, chart: str, start: float, end: float, slant: float = 0.0) -> None:
    """Drag with the mouse across a plot, between two shares of its width, level or slanted."""
    plot = page.locator(f"#plot-{chart}")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    height = box["y"] + 0.55 * box["height"]
    page.mouse.move(box["x"] + start * box["width"], height)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], height + slant * box["height"], steps=8)
    page.mouse.up()


def swipe(page: Page, x: float, y: float, distance: float) -> None:
    """Move one finger up or down from a point, in steps as a hand does."""
    session = page.context.new_cdp_session(page)
    touch = "Input.dispatchTouchEvent"
    session.send(touch, {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for i in range(1, 11):
        session.send(touch, {"type": "touchMove", "touchPoints": [{"x": x, "y": y + distance * i / 10}]})
        page.wait_for_timeout(16)
    session.send(touch, {"type": "touchEnd", "touchPoints": []})


def painted(page: Page, chart: str, colour: str) -> int:
    """Pixels of a plot in a colour; a thin line has only blended ones, so a few levels away still count."""
    wanted = channels(colour)
    near = {c: n for c, n in pixels(page, chart).items() if np.abs(channels(c) - wanted).max() <= 12}
    return sum(near.values())


def channels(colour: str) -> Any:
    """Red, green and blue of ``#rrggbb``."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def pixels(page: Page, chart: str) -> dict[str, int]:
    """Pixels of a plot that are not mostly transparent, by colour."""
    counts: dict[str, int] = page.evaluate(PIXELS, chart)["counts"]
    return counts


def picture(page: Page, chart: str) -> int:
    """A hash of a plot's pixels."""
    value: int = page.evaluate(PIXELS, chart)["hash"]
    return value


def wait_for_change(page: Page, chart: str, before: int) -> None:
    """Wait until a plot's pixels differ from an earlier picture; fails when they never do."""
    page.wait_for_function(f"([name, before]) => ({PIXELS})(name).hash !== before", arg=[chart, before])
