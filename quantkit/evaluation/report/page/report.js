(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const places = [...document.querySelectorAll("[data-chart]")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const NARROW = 560;

  function config(width) {
    const [ink, soft, grid, edge] = ["--ink", "--soft", "--grid", "--edge"].map(color);
    const narrow = width < NARROW;
    return {
      background: "transparent", font: "system-ui, sans-serif", view: { stroke: null },
      axis: { labelColor: soft, titleColor: soft, gridColor: grid, tickColor: edge, domainColor: edge,
        labelFontSize: 11.5, titleFontSize: 12, titleFontWeight: "normal", titlePadding: 8,
        labelLimit: narrow ? 125 : 260 },
      axisQuantitative: { tickCount: narrow ? 4 : 8 },
      legend: { orient: "bottom", direction: "horizontal", columns: Math.max(1, Math.floor(width / 200)),
        labelColor: ink, titleColor: soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
        symbolSize: 90, symbolOpacity: 1, labelLimit: 230,
        layout: { bottom: { anchor: "start", direction: narrow ? "vertical" : "horizontal", margin: 12 } },
        columnPadding: 16, rowPadding: 3, offset: 10 },
      text: { color: ink }, rule: { color: ink }, line: { color: ink },
      point: { color: ink },
    };
  }

  // names beside the marks of a frontier, where there is room at this width
  function named(spec) {
    const known = new Set(spec.marks.map((mark) => mark.name));
    const placed = ["floor_marks", "floor_rule_marks", "stair_marks",
      "ranges_marks", "spans_marks", "best_marks", "dominated_marks"].filter((name) => known.has(name));
    for (const [marks, ink] of [["best_marks", "--ink"], ["dominated_marks", "--soft"]]) {
      if (!known.has(marks)) continue;
      const name = marks.replace("_marks", "_names");
      spec.marks.push({
        type: "text", name, from: { data: marks }, interactive: false,
        encode: { enter: { text: { field: "datum.variant" }, fill: { value: color(ink) },
          fontSize: { value: 11 }, limit: { value: 220 } } },
        transform: [{ type: "label", size: { signal: "[width, height]" },
          avoidMarks: placed.filter((other) => other !== marks),
          anchor: ["right", "left", "top", "bottom", "top-right", "bottom-right", "top-left", "bottom-left",
            "top", "bottom", "right", "left"],
          offset: [6, 6, 6, 6, 3, 3, 3, 3, 16, 16, 18, 18] }],
      });
      placed.push(name);
    }
    return spec;
  }

  async function draw(place) {
    const spec = specs[place.dataset.chart];
    try {
      if (place.embedded) place.embedded.finalize();
      const width = place.drawn = place.clientWidth;
      place.embedded = await window.vegaEmbed(place, { ...spec, width }, {
        mode: "vega-lite", renderer: "svg", ast: true, config: config(width),
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: place.dataset.chart, patch: named,
      });
    } catch (error) {
      place.className = "failed";
      place.textContent = `This chart can't be drawn: ${error.message}`;
      console.error(error);
    }
  }

  async function drawAll(chosen) {
    for (const place of chosen) await draw(place);
    document.documentElement.dataset.drawn = "true";
  }

  drawAll(places);
  dark.addEventListener("change", () => drawAll(places));
  let waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(places.filter((place) => place.drawn !== place.clientWidth)), 150);
  });

  for (const passage of document.querySelectorAll(".passage")) {
    const note = passage.parentElement.querySelector(".chosen-token");
    const choose = (event) => {
      if (!event.target.title) return;
      for (const chosen of passage.querySelectorAll(".chosen")) chosen.classList.remove("chosen");
      event.target.classList.add("chosen");
      note.textContent = event.target.title;
    };
    passage.addEventListener("click", choose);
    passage.addEventListener("focusin", choose);
  }

  const variant = document.querySelector("select.variant");
  variant?.addEventListener("change", () => {
    document.querySelectorAll(".seen").forEach((part, index) => { part.hidden = index !== variant.selectedIndex; });
  });
})();
