"""The page in a real Chromium, opened from file:// and driven with real mouse, touch and keyboard input.

``evaluate`` is used to read only: it runs outside the page's Content-Security-Policy, so that causing
things with it would hide a violation.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_reading import (
    LOW_CONTRAST,
    PLACE,
    STEPS_SHOWN,
    STRIP,
    Page,
    drag,
    painted,
    picture,
    pixels,
    swipe,
    wait_for_change,
)
from synthetic import MANIFEST, healthy_tables, write_run

from analyzer.diagnoses import assess
from analyzer.panels import PANELS
from analyzer.report import render
from analyzer.run_log import open_runs

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FIRST_NAN_STEP = 210
STEPS = 300
MASK_LOST_STEP = 120
SPIKE_STEP = 150
STEP_CHARTS = (
    "loss",
    "learning-rate",
    "gradient-norm",
    "activations",
    "later-keys",
    "attention-entropy",
    "spectral-norms",
    "dead-units",
    "gradient-ratios",
    "label-losses",
)
MAPS = ("activations", "loss-map")
WITHOUT_LINES = (*MAPS, "later-keys")  # under a whole mask the latter is a bar of zeros

Browser = Any
OpenPage = Callable[..., Page]


def missing(what: str) -> None:
    """Skip, or fail under CI=true, where these tests must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}: the page tests must run under CI; install it")
    pytest.skip(f"{what}: the page tests need it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium of this machine."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        missing("no Chromium is installed")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()


def diverged_tables() -> dict[str, Any]:
    """A run whose training loss and activations turn NaN at FIRST_NAN_STEP."""
    tables: dict[str, Any] = {name: dict(columns) for name, columns in healthy_tables(STEPS).items()}
    loss = np.array(tables["steps"]["train_loss"])
    loss[FIRST_NAN_STEP:] = np.nan
    tables["steps"]["train_loss"] = loss
    tensors = tables["tensors"]
    lost = (tensors["kind"] == "activation") & (tensors["step"] >= FIRST_NAN_STEP)
    tensors["nan_count"] = np.where(lost, 64, 0)
    return tables


@pytest.fixture(scope="module")
def diverged_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the diverged run, on disk."""
    return write_page(tmp_path_factory.mktemp("pages") / "diverged", diverged_tables())


@pytest.fixture(scope="module")
def broken_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run without a mask for twenty steps, which a spike of the loss follows."""
    tables: dict[str, Any] = {name: dict(columns) for name, columns in healthy_tables(STEPS).items()}
    attention = tables["attention"]
    lost = (attention["step"] >= MASK_LOST_STEP) & (attention["step"] < MASK_LOST_STEP + 20)
    for name in ("future_mass", "future_mass_beyond_next"):
        attention[name] = np.where(lost, 0.4, 0.0)
    loss = np.array(tables["steps"]["train_loss"])
    loss[SPIKE_STEP] *= 9
    tables["steps"]["train_loss"] = loss
    return write_page(tmp_path_factory.mktemp("pages") / "broken", tables)


def write_page(run: Path, tables: dict[str, Any], manifest: Any = MANIFEST) -> Path:
    """Write a run directory and its page; returns the page's path."""
    write_run(run, tables, manifest)
    with open_runs([run]) as run_log:
        html = render(run_log, assess(run_log))
    page = run / "dashboard.html"
    page.write_text(html, encoding="utf-8")
    return page


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a page file; afterwards checks that it stayed silent and asked nobody for anything."""
    contexts = []
    noise: list[str] = []

    def opened(path: Path, width: int = 1280, scheme: str = "light", touch: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch, is_mobile=touch
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: noise.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda r: noise.append(r.url) if r.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-plots=drawn]")
        page.wait_for_function("Bokeh.documents.every((d) => d.is_idle)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert noise == []


def test_every_line_chart_shows_its_first_series(open_page: OpenPage, diverged_page: Path) -> None:
    """The colour of the first series covers at least as many pixels as a line across half the plot."""
    page = open_page(diverged_page)
    counts = {chart: painted(page, chart, "#0072b2") for chart in STEP_CHARTS if chart not in WITHOUT_LINES}
    assert [chart for chart, count in counts.items() if count <= 200] == []


def test_every_map_shows_many_colours(open_page: OpenPage, diverged_page: Path) -> None:
    """Cells of different values have different colours."""
    page = open_page(diverged_page)
    colours = {chart: sum(count > 60 for count in pixels(page, chart).values()) for chart in MAPS}
    assert [chart for chart, count in colours.items() if count < 8] == []


def test_non_finite_steps_are_red_crosses(open_page: OpenPage, diverged_page: Path) -> None:
    """The strip of the loss panel carries the alarm colour, and pointing at it says what and since when."""
    page = open_page(diverged_page)
    assert painted(page, "loss", "#b3261e") > 100
    plot = page.locator("#plot-loss")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    x, y = page.evaluate(PLACE, ["loss", FIRST_NAN_STEP, 0.965, STRIP])
    page.mouse.move(box["x"] + x, box["y"] + y)
    tooltip = page.locator(".bk-Tooltip tr")
    tooltip.first.wait_for()
    assert tooltip.all_inner_texts() == ["\tNaN", "series\ttrain, each batch", "step\t210 to 299 (90 rows)"]


def test_box_zoom_moves_every_other_panel(open_page: OpenPage, diverged_page: Path) -> None:
    """Dragging across the loss panel narrows the shared steps and repaints each other step panel."""
    page = open_page(diverged_page)
    before = {chart: picture(page, chart) for chart in STEP_CHARTS}
    start, end = page.evaluate(STEPS_SHOWN)
    drag(page, "loss", 0.3, 0.6)
    for chart in STEP_CHARTS:
        wait_for_change(page, chart, before[chart])
    zoomed = page.evaluate(STEPS_SHOWN)
    assert start < zoomed[0] < zoomed[1] < end
    assert zoomed[1] - zoomed[0] < 0.5 * (end - start)


def test_wheel_scrolls_the_page_and_zooms_only_with_control(open_page: OpenPage, diverged_page: Path) -> None:
    """A bare wheel over a plot moves the page and leaves the steps; with Ctrl it is the other way round."""
    page = open_page(diverged_page)
    plot = page.locator("#plot-loss")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    start, end = page.evaluate(STEPS_SHOWN)
    scrolled = page.evaluate("window.scrollY")
    page.mouse.wheel(0, 120)
    page.wait_for_function("(y) => window.scrollY > y", arg=scrolled)
    assert page.evaluate(STEPS_SHOWN) == [start, end]
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    page.wait_for_function(
        f"(width) => {{ const [a, b] = ({STEPS_SHOWN})(); return b - a < width; }}", arg=end - start
    )


def test_strip_stays_on_the_edge(open_page: OpenPage, diverged_page: Path) -> None:
    """Neither a slanted zoom box nor the wheel moves the range that non-finite marks are placed in."""
    page = open_page(diverged_page)
    place = [*page.evaluate(PLACE, ["loss", 0, 0, STRIP]), *page.evaluate(PLACE, ["loss", 0, 1, STRIP])]
    drag(page, "loss", 0.6, 0.9, slant=-0.25)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    page.wait_for_function(f"() => {{ const [a, b] = ({STEPS_SHOWN})(); return b - a < 70; }}")
    after = [*page.evaluate(PLACE, ["loss", 0, 0, STRIP]), *page.evaluate(PLACE, ["loss", 0, 1, STRIP])]
    assert after[1::2] == place[1::2]


def test_verdict_link_zooms_to_its_steps(open_page: OpenPage, diverged_page: Path) -> None:
    """Clicking the evidence of a finding shows its panel with the steps of the finding in view."""
    page = open_page(diverged_page)
    page.locator("a[data-first-step]").first.click()
    start, end = page.evaluate(STEPS_SHOWN)
    assert start <= FIRST_NAN_STEP <= STEPS - 1 <= end
    assert start > 0.4 * FIRST_NAN_STEP
    top = page.locator("#panel-1").bounding_box()["y"]
    assert 0 <= top < 900


@pytest.mark.parametrize("width", [390, 1280])
def test_finding_goes_to_its_chart_and_back(open_page: OpenPage, broken_page: Path, width: int) -> None:
    """The chart of attention is in view with its steps and a margin; one press shows the whole run again."""
    page = open_page(broken_page, width=width, touch=width == 390)
    whole = page.evaluate(STEPS_SHOWN)
    button = page.get_by_role("button", name="Whole run")
    assert button.is_disabled()
    page.locator("#finding-causal_mask_absent .findings a").click()
    assert page.evaluate(STEPS_SHOWN) == [MASK_LOST_STEP - 10, MASK_LOST_STEP + 19 + 10]
    assert 0 <= page.locator("#chart-later-keys").bounding_box()["y"] < 300
    button.click()
    assert page.evaluate(STEPS_SHOWN) == whole
    assert button.is_disabled()


def test_symptom_and_spike_go_to_their_steps(open_page: OpenPage, broken_page: Path) -> None:
    """What a cause explains is linked like the cause, and so is each spike of the loss."""
    page = open_page(broken_page)
    for link in (".spikes a", "dd a"):
        page.locator(f"#finding-causal_mask_absent {link}").first.click()
        start, end = page.evaluate(STEPS_SHOWN)
        assert start < SPIKE_STEP < end
        assert end - start < 60
        page.get_by_role("button", name="Whole run").click()


def test_zeros_of_attention_are_a_bar_without_alarm(open_page: OpenPage, broken_page: Path) -> None:
    """Before and after the steps without a mask the bottom edge is grey; nothing is red."""
    page = open_page(broken_page)
    assert painted(page, "later-keys", "#6a7178") > 200
    assert painted(page, "later-keys", "#b3261e") == 0
    assert painted(page, "later-keys", "#0072b2") > 20


def test_clear_checks_open_without_a_script(browser: Browser, broken_page: Path) -> None:
    """Folded at first, they open by the browser's own means; findings and sentences are there too."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(broken_page.as_uri())
    clear = page.locator("details", has=page.locator("summary .outcome.clear"))
    assert not clear.locator("th[scope=row]").first.is_visible()
    clear.locator("summary").click()
    assert clear.locator("th[scope=row]").first.is_visible()
    assert page.locator("#finding-causal_mask_absent").is_visible()
    assert page.locator("#summary-later-keys").is_visible()
    assert "The charts need JavaScript" in page.locator("noscript").inner_text()
    context.close()


def test_steps_can_be_chosen_by_keyboard(open_page: OpenPage, diverged_page: Path) -> None:
    """Typing two steps and Enter shows exactly these; Whole run goes back."""
    page = open_page(diverged_page)
    whole = page.evaluate(STEPS_SHOWN)
    page.get_by_label("Steps", exact=True).fill("100")
    page.get_by_label("to", exact=True).fill("150")
    page.keyboard.press("Enter")
    assert page.evaluate(STEPS_SHOWN) == [99.5, 150.5]
    page.get_by_role("button", name="Whole run").click()
    assert page.evaluate(STEPS_SHOWN) == whole


def test_hover_tells_step_and_value(open_page: OpenPage, diverged_page: Path) -> None:
    """Pointing at a line names the series and gives its step and value."""
    page = open_page(diverged_page)
    plot = page.locator("#plot-dead-units")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    x, y = page.evaluate(PLACE, ["dead-units", 13, 2 / 256, "default"])
    page.mouse.move(box["x"] + x + 1, box["y"] + y)
    tooltip = page.locator(".bk-Tooltip tr")
    tooltip.first.wait_for()
    assert tooltip.all_inner_texts() == ["\tlayer 0", "step\t13", "dead share\t0.0078125"]


def test_legend_button_hides_its_line(open_page: OpenPage, diverged_page: Path) -> None:
    """After a click the series is gone from the canvas and the button says so to assistive technology."""
    page = open_page(diverged_page)
    before = picture(page, "dead-units")
    button = page.locator("#chart-dead-units .legend button").first
    button.click()
    wait_for_change(page, "dead-units", before)
    assert painted(page, "dead-units", "#0072b2") == 0
    assert button.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["diverged_page", "broken_page"])
def test_text_has_contrast(
    open_page: OpenPage, request: pytest.FixtureRequest, name: str, scheme: str
) -> None:
    """Every text of the page has at least 4.5:1 against its background (WCAG 2.2 AA)."""
    page = open_page(request.getfixturevalue(name), scheme=scheme)
    assert page.evaluate(LOW_CONTRAST) == []


def test_plots_follow_the_colour_scheme(open_page: OpenPage, diverged_page: Path) -> None:
    """Opened dark, the lines are light ones; when the scheme changes the canvases change with it."""
    page = open_page(diverged_page, scheme="dark")
    assert painted(page, "spectral-norms", "#56b4e9") > 200
    before = picture(page, "spectral-norms")
    page.emulate_media(color_scheme="light")
    wait_for_change(page, "spectral-norms", before)
    assert painted(page, "spectral-norms", "#0072b2") > 200


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["diverged_page", "broken_page"])
def test_page_never_scrolls_sideways(
    open_page: OpenPage, request: pytest.FixtureRequest, name: str, width: int
) -> None:
    """The document is as wide as the window, on a telephone and on a desk."""
    page = open_page(request.getfixturevalue(name), width=width, touch=width == 390)
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_finger_on_a_plot_scrolls_the_page(open_page: OpenPage, diverged_page: Path) -> None:
    """A vertical swipe that begins on a plot moves the page instead of drawing a zoom box."""
    page = open_page(diverged_page, width=390, touch=True)
    plot = page.locator("#plot-loss")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    scrolled = page.evaluate("window.scrollY")
    shown = page.evaluate(STEPS_SHOWN)
    swipe(page, box["x"] + 0.5 * box["width"], box["y"] + 0.6 * box["height"], -150)
    page.wait_for_function("(y) => window.scrollY > y + 100", arg=scrolled)
    assert page.evaluate(STEPS_SHOWN) == shown


def test_hostile_names_stay_text(open_page: OpenPage, tmp_path: Path) -> None:
    """Markup, a closing script tag and TeX marks in names of the run are shown, not run, and load nothing."""
    hostile = "</script><img src=x onerror=alert(1)>$$x^2$$"
    tables: dict[str, Any] = {name: dict(columns) for name, columns in healthy_tables(60).items()}
    names = tables["tensor_names"]
    names["name"] = [f"{name}.{hostile}" for name in names["name"]]
    names["module"] = [f"{name}.{hostile}" for name in names["module"]]
    labels = tables["examples"]
    labels["verb"] = [f"{hostile} {verb}" for verb in labels["verb"]]
    labels["regularity"] = [f"{value} {hostile}" for value in labels["regularity"]]
    manifest = dataclasses.replace(MANIFEST, loss_reduction=hostile, config={hostile: hostile})
    page = open_page(write_page(tmp_path / "<b>run&", tables, manifest))
    assert page.locator("h1").inner_text() == "<b>run&"
    assert page.locator("img").count() == 0
    assert hostile in page.locator("#summary-label-losses").inner_text()


def test_run_without_rows_opens(open_page: OpenPage, tmp_path: Path) -> None:
    """A run that was killed before its first row says for each chart what was not recorded."""
    path = tmp_path / "empty"
    write_run(path, {})
    with open_runs([path]) as run_log:
        html = render(run_log, assess(run_log))
    file = path / "dashboard.html"
    file.write_text(html, encoding="utf-8")
    page = open_page(file)
    assert page.locator(".unrecorded").count() == sum(len(panel.charts) for panel in PANELS)
