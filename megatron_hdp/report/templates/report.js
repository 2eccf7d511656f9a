"use strict";
(async function () {
  const NARROW = 640; // pixels of a page that is a phone's
  const PRINT_WIDTH = 686; // pixels of A4 within its margins
  const root = document.documentElement;
  const touch = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not zoom charts
  const drawn = []; // {element, width, layout of a width}
  let printing = false;

  function trouble(words) {
    const place = document.getElementById("trouble");
    place.textContent = words;
    place.hidden = false;
    root.dataset.state = "failed";
  }

  async function unpacked(id) {
    const letters = document.getElementById(id).textContent;
    const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function widthOf(element) {
    return printing ? PRINT_WIDTH : element.clientWidth;
  }

  // Layout of a chart at a width: what all charts share, then the chart's own.
  function laidOut(chart, width) {
    const narrow = width < NARROW;
    const own = structuredClone(chart.layout);
    const entries = chart.traces.filter((trace) => trace.name).length;
    const legend = own.showlegend !== false && entries > 1;
    const layout = Object.assign({}, own, {
      width: width,
      height: printing ? chart.height * (own.yaxis.automargin ? 1 : 0.8) : (narrow ? chart.narrow : chart.height) + (legend && narrow ? 16 * entries : 0),
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size: narrow ? 12 : 13, color: "#1b1b1b" },
      paper_bgcolor: "#fff",
      plot_bgcolor: "#fff",
      margin: Object.assign({ l: narrow ? 52 : 64, r: narrow ? 10 : 18, t: legend ? 44 : 24, b: 52 }, own.margin),
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
      hoverlabel: { bgcolor: "#fff", bordercolor: "#555", font: { size: 12, color: "#1b1b1b" } },
      dragmode: narrow || touch ? false : "zoom",
    });
    layout.showlegend = legend;
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      const axis = layout[name];
      const defaults = { gridcolor: "#e4e4e4", zerolinecolor: "#999", linecolor: "#777", showline: true, ticks: "outside", ticklen: 4, fixedrange: narrow || touch || name[0] === "y", automargin: true };
      layout[name] = Object.assign(defaults, axis);
      if (axis.title) layout[name].title = Object.assign({ standoff: 8, font: { size: narrow ? 12 : 13 } }, axis.title);
      if (name[0] === "x" && axis.type !== "category" && axis.type !== "log") layout[name].nticks = narrow ? 5 : 9;
      if (name[0] === "x" && axis.type === "category" && narrow) layout[name].tickangle = -55;
    }
    return layout;
  }

  // Heat maps of a raster: rows of letters, one for each cell, "a" is the first state.
  function heatMaps(cells) {
    const count = cells.states.length;
    const scale = [];
    cells.colours.forEach((colour, index) => scale.push([index / count, colour], [(index + 1) / count, colour]));
    return cells.planes.map((plane) => {
      const columns = plane.rows[0].length;
      const step = cells.seconds / columns;
      const z = plane.rows.map((row) => Uint8Array.from(row, (letter) => letter.charCodeAt(0) - 97));
      return {
        type: "heatmap",
        z: z,
        x0: step / 2,
        dx: step,
        y: plane.y,
        yaxis: plane.axis,
        text: z.map((row, index) => {
          const words = cells.states.map((state) => cells.labels[index] + ": " + state);
          return Array.from(row, (state) => words[state]);
        }),
        zmin: -0.5,
        zmax: count - 0.5,
        colorscale: scale,
        showscale: false,
        zsmooth: false,
        hovertemplate: "%{text}<br>at %{x:.4g} s<extra></extra>",
      };
    });
  }

  function place(chart, element) {
    const traces = chart.cells ? heatMaps(chart.cells) : chart.traces;
    const width = widthOf(element);
    Plotly.newPlot(element, traces, laidOut(chart, width), { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: "reset" });
    element.style.height = "auto";
    drawn.push({ chart: chart, element: element, width: width });
  }

  function fit() {
    for (const one of drawn) {
      const width = widthOf(one.element);
      if (width === 0 || width === one.width) continue;
      one.width = width;
      // The second time a legend that has other rows now has its place: printing does not wait until plotly does that.
      for (let time = 0; time < 2; time += 1) Plotly.relayout(one.element, laidOut(one.chart, width));
    }
  }

  function redraw(element, chart) {
    const one = drawn.find((other) => other.element === element);
    if (one === undefined) return place(chart, element);
    one.chart = chart;
    one.width = widthOf(element);
    Plotly.react(element, chart.traces, laidOut(chart, one.width));
  }

  function forPrint(on) {
    if (printing === on) return;
    printing = on;
    for (const details of document.querySelectorAll(".words")) {
      if (on) details.dataset.was = details.open ? "open" : "shut";
      details.open = on || details.dataset.was === "open";
    }
    fit();
  }

  if (typeof DecompressionStream === "undefined") {
    trouble("This browser cannot unpack the charts (it lacks DecompressionStream; browsers since 2023 have it). All numbers are in the tables.");
    return;
  }
  try {
    const data = JSON.parse(await unpacked("packed-data"));
    const library = document.createElement("script");
    library.textContent = await unpacked("packed-library");
    document.head.appendChild(library);
    if (typeof Plotly === "undefined") throw new Error("the chart library did not start");
    for (const chart of data.charts) {
      place(chart, document.querySelector("#" + CSS.escape(chart.name) + " .plot"));
      await new Promise((go) => setTimeout(go)); // lets the page scroll meanwhile
    }
    for (const [name, start] of Object.entries(data.panels)) whatIf(document.getElementById(name), start, redraw);
    let waiting = 0;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(fit, 120);
    });
    window.addEventListener("beforeprint", () => forPrint(true));
    window.addEventListener("afterprint", () => forPrint(false));
    fit(); // a scroll bar may have come since
    root.dataset.charts = String(drawn.length);
    root.dataset.state = "drawn";
  } catch (error) {
    trouble("The charts cannot be drawn (" + error.message + "). All numbers are in the tables.");
    throw error;
  }
})();
