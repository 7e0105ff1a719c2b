// Draws the plots, follows the colour scheme, and links verdicts, legends and the step form to them.
"use strict";
(function () {
  const text = document.getElementById("plots").textContent;
  const darkOf = new Map(Object.entries(JSON.parse(text).dark));
  const lightOf = new Map([...darkOf].map(([light, dark]) => [dark, light]));
  const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");

  // Before the first paint colours are replaced in the JSON itself: no flash of the other scheme.
  function coloured(json) {
    return json.replace(/"#[0-9a-f]{6}"/g, (quoted) => `"${darkOf.get(quoted.slice(1, -1)) ?? quoted.slice(1, -1)}"`);
  }

  const page = JSON.parse(darkScheme.matches ? coloured(text) : text);
  if (page.items[0].root_ids.length === 0) {
    document.documentElement.dataset.plots = "drawn";
    return;
  }
  Bokeh.embed.embed_items(page.documents, page.items).then(start);

  function start() {
    const bokehDocument = Bokeh.documents[Bokeh.documents.length - 1];
    const plots = new Map(bokehDocument.roots().map((plot) => [plot.name, plot]));
    const steps = bokehDocument.get_model_by_name("steps");
    darkScheme.addEventListener("change", () => recolour(bokehDocument, darkScheme.matches ? darkOf : lightOf));
    if (window.matchMedia("(pointer: coarse)").matches) {
      releaseTouch(plots);
    }
    linkLegends(plots);
    plots.forEach(keepTicks);
    if (steps !== null) {
      linkSteps(steps);
    }
    document.documentElement.dataset.plots = "drawn";
  }

  // Canvases do not follow style sheets: replace every colour of the palette in every model.
  function recolour(bokehDocument, colours) {
    for (const model of bokehDocument.all_models) {
      if (model.type === "ColumnDataSource") {
        recolourColumn(model, colours);
        continue;
      }
      const changed = {};
      for (const property of [...model].filter((p) => p.attr.endsWith("color"))) {
        const value = property.get_value();
        if (colours.has(value)) {
          changed[property.attr] = colours.get(value);
        } else if (colours.has(value?.value)) {
          changed[property.attr] = { ...value, value: colours.get(value.value) };
        }
      }
      if (Object.keys(changed).length > 0) {
        model.setv(changed);
      }
    }
  }

  function recolourColumn(source, colours) {
    const columns = source.data instanceof Map ? source.data : new Map(Object.entries(source.data));
    if (columns.has("colour")) {
      const replaced = Array.from(columns.get("colour"), (colour) => colours.get(colour) ?? colour);
      source.data = new Map([...columns, ["colour", replaced]]);
    }
  }

  // A plot with an active drag tool would keep a finger from scrolling the page.
  function releaseTouch(plots) {
    for (const plot of plots.values()) {
      for (const tool of plot.toolbar.tools) {
        if (tool.type === "BoxZoomTool" || tool.type === "WheelZoomTool") {
          tool.active = false;
        }
      }
    }
  }

  // Log axes have their ticks chosen for the whole range; a zoomed one gets evenly spaced ones in their place.
  function keepTicks(plot) {
    const { start, end } = plot.y_range;
    for (const axis of [...plot.left, ...plot.right].filter((a) => a.tags.includes("log") || a.tags.includes("perplexity"))) {
      const whole = { ticks: axis.ticker.ticks, labels: axis.major_label_overrides };
      const perplexity = axis.tags.includes("perplexity");
      plot.y_range.change.connect(() => {
        const zoomed = plot.y_range.start !== start || plot.y_range.end !== end;
        const { ticks, labels } = zoomed ? spacedTicks(plot.y_range, perplexity) : whole;
        axis.ticker.ticks = ticks;
        axis.major_label_overrides = labels;
      });
    }
  }

  function spacedTicks(range, perplexity) {
    const labels = new Map();
    for (let i = 0; i <= 8; i++) {
      const value = range.start * Math.pow(range.end / range.start, i / 8);
      const shown = Number((perplexity ? Math.exp(value) : value).toPrecision(perplexity ? 4 : 3));
      const tick = perplexity ? Math.log(shown) : shown;
      if (Number.isFinite(tick) && tick >= range.start && tick <= range.end) {
        labels.set(tick, String(shown));
      }
    }
    return { ticks: [...labels.keys()], labels };
  }

  function linkLegends(plots) {
    for (const button of document.querySelectorAll("button[data-renderer]")) {
      button.disabled = false;
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        for (const renderer of plots.get(button.dataset.chart).renderers) {
          if (renderer.name === button.dataset.renderer) {
            renderer.visible = shown;
          }
        }
      });
    }
  }

  function linkSteps(steps) {
    const all = { start: steps.start, end: steps.end };
    const form = document.getElementById("step-form");
    const first = document.getElementById("first-step");
    const last = document.getElementById("last-step");
    const whole = document.getElementById("all-steps");
    const show = (start, end) =>
      steps.setv({ start: Math.max(all.start, Math.min(start, end)), end: Math.min(all.end, Math.max(start, end)) });
    const [recordedFirst, recordedLast] = steps.tags;
    const report = () => {
      first.value = String(Math.max(recordedFirst, Math.ceil(steps.start)));
      last.value = String(Math.min(recordedLast, Math.floor(steps.end)));
      whole.disabled = steps.start === all.start && steps.end === all.end;
    };
    steps.change.connect(report);
    report();
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (first.value !== "" && last.value !== "") {
        show(Number(first.value) - 0.5, Number(last.value) + 0.5);
      }
    });
    whole.addEventListener("click", () => steps.setv(all));
    for (const link of document.querySelectorAll("a[data-first-step]")) {
      link.addEventListener("click", () => {
        const from = Number(link.dataset.firstStep);
        const to = Number(link.dataset.lastStep);
        const margin = Math.max(10, 0.5 * (to - from));
        show(from - margin, to + margin);
      });
    }
  }
})();
