"use strict";
// Draws the page from the data of fcjax/report/digest.py. Statistics are computed there; this script only selects.

const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const MOST_PANELS = 12;
const X = { time: ["simulated time", "s"], energy: ["energy of all devices", "J"], rounds: ["rounds", ""] };
const KINDS = { best: "best model so far", current: "current model" };
const PARTS = { computing_s: ["computing", data.colours[5]], sending_s: ["sending", data.colours[4]] };
const TIMES = { last: ["took part and finished last", data.colours[2]], others: ["took part", faded(data.colours[2], 0.45)] };
const state = {
  hidden: data.axes.map(() => new Set()), // hidden values of each axis
  x: "time", kind: "best", metric: Object.keys(data.compared)[0], base: 0, by: Object.keys(data.quantities)[0],
  run: Number(Object.keys(data.rasters.runs)[0] ?? -1), sorted: {},
};

// Elements and formats.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function lineColour(line) {
  const found = data.colours[line % data.colours.length];
  return found === "#000000" ? colour("--ink") : found;
}

const dash = (line) => ["solid", "dash", "dot", "dashdot"][Math.floor(line / data.colours.length) % 4];

function faded(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

const named = (label, unit) => (unit ? `${label} (${unit})` : label);

function number(value, scale = 1, digits = 3) {
  return value === null || value === undefined ? "-" : (scale * value).toFixed(digits);
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// Filters.

const isShown = (cell) => cell.at.every((value, axis) => !state.hidden[axis].has(value));
const shownCells = () => data.cells.filter(isShown);

function filters() {
  data.axes.forEach((axis, number) => {
    const hidden = state.hidden[number];
    const boxes = [];
    const chips = axis.values.map((value, place) => {
      const box = element("input", { type: "checkbox", checked: true, name: axis.name, value });
      box.onchange = () => { hidden[box.checked ? "delete" : "add"](place); draw(); };
      boxes.push(box);
      const key = number === COLOURED ? [swatch(data.lines.indexOf(value))] : [];
      return element("label", { className: "chip", title: `${axis.name} ${value}` }, box, ...key, value);
    });
    const all = element("button", { type: "button", textContent: "all / none" });
    all.onclick = () => {
      const checked = boxes.some((box) => !box.checked);
      boxes.forEach((box, place) => { box.checked = checked; hidden[checked ? "delete" : "add"](place); });
      draw();
    };
    by("filters").append(element("fieldset", {}, element("legend", { textContent: axis.name }), ...chips, all));
  });
}

// The axis whose values are the lines, one to one; -1 if lines are combinations of policy and phi.
const COLOURED = data.axes.findIndex((axis, number) =>
  axis.values.length === data.lines.length && data.cells.every((cell) => axis.values[cell.at[number]] === data.lines[cell.line]));

function swatch(line) {
  const made = element("span", { className: "swatch" });
  made.dataset.line = line;
  return made;
}

function linesLegend() {
  if (COLOURED >= 0 || data.lines.length < 2) return;
  by("lines-legend").replaceChildren(...data.lines.map((name, line) => element("span", {}, swatch(line), name)));
}

function choose(id, options, key, redraw) {
  const names = Object.keys(options);
  by(id).replaceChildren(...names.map((name) => {
    const button = element("button", { type: "button", textContent: options[name], value: name });
    button.ariaPressed = String(state[key] === name);
    button.onclick = () => {
      state[key] = name;
      for (const other of by(id).children) other.ariaPressed = String(other === button);
      redraw(shownCells());
    };
    return button;
  }));
  by(id).hidden = names.length < 2;
}

// Charts.

function layout(more) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--faint"), linecolor: colour("--line"), automargin: true };
  const axes = {};
  for (const name of Object.keys(more).filter((name) => /^[xy]axis/.test(name))) axes[name] = { ...axis, ...more[name] };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", color: colour("--ink"), size: 12 },
    margin: { l: 56, r: 12, t: 8, b: 44 }, showlegend: false, height: 300,
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    ...more, ...axes,
  };
}

const plot = (place, traces, more) => Plotly.react(place, traces, layout(more), {
  responsive: true, displayModeBar: false,
});

function panels(id, drawPanel, cells) {
  const holder = by(id);
  const wanted = [...new Set(cells.map((cell) => cell.panel))].sort((a, b) => a - b);
  const shown = wanted.slice(0, MOST_PANELS);
  while (holder.children.length > shown.length) {
    Plotly.purge(holder.lastChild.lastChild);
    holder.lastChild.remove();
  }
  while (holder.children.length < shown.length) holder.append(element("div", {}, element("h3"), element("div")));
  holder.classList.toggle("alone", shown.length === 1);
  shown.forEach((panel, place) => {
    const [title, chart] = holder.children[place].children;
    title.textContent = data.panels[panel];
    drawPanel(chart, cells.filter((cell) => cell.panel === panel), panel);
  });
  return wanted.length > shown.length ? ` Only ${shown.length} of ${wanted.length} settings are drawn: select fewer above.` : "";
}

function drawCurves(cells) {
  const [label, unit] = X[state.x];
  const values = cells.flatMap((cell) => [...(cell.curves[state.x]?.[state.kind][0] ?? []), cell.published ?? []].flat());
  const range = [Math.max(0, 100 * Math.min(...values) - 4), Math.min(100, 100 * Math.max(...values) + 4)];
  const more = panels("curves", (chart, some) => plot(chart, some.flatMap(curve), {
    hovermode: "x unified",
    xaxis: { title: { text: named(label, unit) }, rangemode: "tozero", unifiedhovertitle: { text: `${label} %{x:.4~g} ${unit}` } },
    yaxis: { title: { text: "test accuracy (%)" }, range },
  }), cells);
  const bands = `Bands are 95% intervals over seeds (Student's t), for ${data.least_seeds} seeds or more.`;
  const published = cells.some((cell) => cell.published != null) ? " Diamonds are published values of the best model." : "";
  by("curve-caption").textContent =
    `Lines are means over seeds; a run keeps its last model after its last round. ${bands}${published}${more}`;
}

function curve(cell) {
  const found = cell.curves[state.x];
  if (!found) return [];
  const [mean, half] = found[state.kind];
  const name = data.lines[cell.line], ink = lineColour(cell.line);
  const y = mean.map((value) => 100 * value);
  const traces = [];
  if (half) {
    const ends = (sign) => y.map((value, i) => Math.min(100, Math.max(0, value + sign * 100 * half[i])));
    traces.push({
      x: [...found.x, ...found.x.toReversed()], y: [...ends(1), ...ends(-1).toReversed()], fill: "toself", mode: "lines",
      line: { width: 0 }, fillcolor: faded(ink, 0.12), hoverinfo: "skip",
    });
  }
  traces.push({
    x: found.x, y, name, mode: "lines", line: { color: ink, width: 2, dash: dash(cell.line) },
    customdata: half ? half.map((value) => ` ± ${(100 * value).toFixed(2)}`) : y.map(() => ""),
    hovertemplate: `%{y:.2f}%{customdata}%<extra>${name}</extra>`,
  });
  if (cell.published != null && state.x === "time" && state.kind === "best") traces.push({
    x: [found.x.at(-1)], y: [100 * cell.published], name, mode: "markers", cliponaxis: false,
    marker: { symbol: "diamond", size: 9, color: ink, line: { color: colour("--card"), width: 1 } },
    hovertemplate: `%{y:.2f}%<extra>${name}, published</extra>`,
  });
  return traces;
}

function drawPairs(cells) {
  const pairs = data.pairs[state.metric];
  by("differences").hidden = !pairs;
  if (!pairs) return;
  const [label, unit, scale, digits] = data.compared[state.metric];
  const base = data.lines[state.base];
  const others = cells.filter((cell) => cell.line !== state.base);
  panels("pairs", (chart, some, panel) => {
    const traces = some.flatMap((cell) => {
      const isPair = ({ a, b }) => (a === cell.line && b === state.base) || (b === cell.line && a === state.base);
      const pair = pairs.find((one) => one.panel === panel && isPair(one));
      if (!pair) return [];
      const sign = pair.a === cell.line ? scale : -scale;
      const difference = sign * pair.difference;
      const [low, high] = [sign * pair.low, sign * pair.high].sort((one, other) => one - other);
      const settled = pair.verdict !== "undecided", ink = lineColour(cell.line);
      return [{
        x: [difference], y: [data.lines[cell.line]], mode: "markers", cliponaxis: false,
        marker: { color: settled ? ink : colour("--card"), size: 10, line: { color: ink, width: 2 } },
        error_x: { type: "data", symmetric: false, array: [high - difference], arrayminus: [difference - low], color: ink, thickness: 2, width: 5 },
        hovertemplate: `%{y} − ${base}: %{x:.${digits}f} ${unit}<br>95% interval ${low.toFixed(digits)} to ${high.toFixed(digits)}` +
          `<br>${pair.seeds} seeds, p = ${number(pair.p_holm)} after Holm's correction<extra></extra>`,
      }];
    });
    plot(chart, traces, {
      height: 90 + 26 * some.length, hovermode: "closest",
      xaxis: { title: { text: named(`${label} minus ${base}`, unit) }, zeroline: true, zerolinewidth: 1 },
      yaxis: { autorange: "reversed", type: "category" },
    });
  }, others);
}

function drawParts(cells) {
  by("parts").hidden = !("computing_s" in data.columns);
  if (by("parts").hidden) return;
  panels("parts-panels", (chart, some) => plot(chart, Object.entries(PARTS).map(([name, [label, ink]]) => ({
    type: "bar", orientation: "h", name: label, y: some.map((cell) => data.lines[cell.line]),
    x: some.map((cell) => cell.means[name][0]), marker: { color: ink },
    hovertemplate: `%{y}: %{x:.3f} s ${label}<extra></extra>`,
  })), {
    barmode: "stack", height: 70 + 26 * some.length,
    xaxis: { title: { text: "mean round time (s)" } }, yaxis: { autorange: "reversed", type: "category" },
  }), cells);
}

function drawFairness(cells) {
  panels("fairness-panels", (chart, some) => plot(chart, some.map((cell) => {
    const [mean, half] = cell.means.jain_index, ink = lineColour(cell.line);
    return {
      x: [mean], y: [data.lines[cell.line]], mode: "markers", marker: { color: ink, size: 10 },
      error_x: { type: "data", array: [half ?? 0], color: ink, thickness: 2, width: 5 },
      hovertemplate: `%{y}: %{x:.3f}${half === null ? "" : ` ± ${half.toFixed(3)}`}<extra></extra>`,
    };
  }), {
    height: 90 + 26 * some.length, hovermode: "closest", xaxis: { title: { text: "Jain index" }, range: [0, 1.03] },
    yaxis: { autorange: "reversed", type: "category" },
  }), cells);
}

// Tables.

function table(id, heads, rows, redraw) {
  const sorted = state.sorted[id];
  if (sorted) {
    const { column, sign } = sorted;
    const key = (row) => row.keys[column] ?? -Infinity;
    rows.sort((a, b) => sign * (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0));
  }
  const head = element("tr", {}, ...heads.map(([label, unit, isWord], column) => {
    const made = element("th", { className: isWord ? "word" : "" }, label, element("small", { textContent: unit || "\u00a0" }));
    made.onclick = () => {
      state.sorted[id] = { column, sign: sorted?.column === column ? -sorted.sign : 1 };
      redraw(shownCells());
    };
    return made;
  }));
  const body = rows.map((row) => {
    const made = element("tr", row.properties ?? {}, ...row.texts.map((text, i) =>
      element("td", { className: heads[i][2] ? "word" : "" }, ...[text].flat())));
    if (row.run !== undefined) made.dataset.run = row.run;
    return made;
  });
  by(id).replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

const settingsOf = (cell) => cell.at.map((value, axis) => data.axes[axis].values[value]);
const settingHeads = () => data.axes.map((axis) => [axis.name, "", true]);

function drawMeans(cells) {
  const columns = Object.entries(data.columns);
  const withPublished = cells.some((cell) => "published" in cell);
  const heads = [...settingHeads(), ["seeds", ""], ...columns.map(([, [label, unit]]) => [label, unit])];
  if (withPublished) heads.push(["published accuracy", "%"]);
  const rows = cells.map((cell) => {
    const means = columns.map(([name]) => cell.means[name]);
    const texts = means.map(([mean, half], i) => {
      const [, , scale, digits] = columns[i][1];
      return half === null ? number(mean, scale, digits) : [number(mean, scale, digits), element("small", {}, ` ± ${number(half, scale, digits)}`)];
    });
    const published = withPublished ? [cell.published] : [];
    return {
      keys: [...cell.at, cell.seeds, ...means.map(([mean]) => mean), ...published],
      texts: [...settingsOf(cell), String(cell.seeds), ...texts, ...published.map((value) => number(value, 100, 2))],
    };
  });
  table("means-table", heads, rows, drawMeans);
  by("means-caption").textContent =
    `± is the half width of the 95% interval (Student's t), for ${data.least_seeds} seeds or more. ` +
    "Finish together: the part of the scheduled devices that finish within 0.1% of the end of the round. Click a heading to sort.";
}

function drawRuns() {
  const columns = Object.entries(data.columns);
  const heads = [...settingHeads(), ["seed", ""], ...columns.map(([, [label, unit]]) => [label, unit]), ["end", "", true]];
  const rows = data.runs.flatMap((run, place) => {
    const cell = data.cells[run.cell];
    if (!isShown(cell)) return [];
    const has = place in data.rasters.runs;
    const choose = () => { if (has) { state.run = place; drawRuns(); drawRun(); } };
    return [{
      run: place,
      keys: [...cell.at, run.seed, ...run.values, run.stop],
      texts: [...settingsOf(cell), String(run.seed), ...run.values.map((value, i) => number(value, columns[i][1][2], columns[i][1][3])), run.stop.replace("_", " ")],
      properties: {
        className: has ? "" : "without", tabIndex: has ? 0 : -1, ariaSelected: String(state.run === place), onclick: choose,
        onkeydown: (event) => { if (event.key === "Enter") choose(); }, title: has ? "" : "the page does not have the rounds of this run",
      },
    }];
  });
  table("runs-table", heads, rows, drawRuns);
}

// One run.

function drawRun() {
  const run = data.rasters.runs[state.run];
  for (const id of ["raster", "run-title", "raster-by"]) by(id).hidden = !run;
  by("partition-part").hidden = run?.partition === undefined;
  if (!run) return;
  const { seed, cell } = data.runs[state.run];
  const settings = settingsOf(data.cells[cell]).map((value, axis) => `${data.axes[axis].name} ${value}`);
  by("run-title").textContent = [...settings, `seed ${seed}`].join(", ");
  const scheduled = bytes(run.scheduled);
  const rounds = Array.from({ length: run.rounds }, (_, i) => i + 1);
  const devices = Array.from({ length: run.devices }, (_, i) => i);
  const times = devices.map((device) => rounds.filter((_, i) => scheduled[i * run.devices + device]).length);
  const withParts = Boolean(run.last);
  const traces = [heatmap(run, scheduled, rounds, devices), ...timesBars(run, devices, times)];
  if (run.lost) traces.push({
    x: run.lost.map(([round]) => round + 1), y: run.lost.map(([, device]) => device), mode: "markers",
    marker: { symbol: "x-thin", size: 6, line: { color: "#d55e00", width: 2 } }, hovertemplate: "update lost<extra></extra>",
  });
  if (withParts) for (const [name, [label, ink]] of Object.entries(PARTS)) traces.push({
    type: "bar", x: rounds, y: run[name], yaxis: "y2", name: label, marker: { color: ink }, customdata: run.last,
    hovertemplate: `round %{x}: %{y:.3f} s ${label}<br>device %{customdata} finished last<extra></extra>`,
  });
  const high = Math.max(180, Math.min(16 * run.devices, 640)), low = withParts ? 190 : 40;
  const bottom = withParts ? low / (high + low) : 0;
  plot(by("raster"), traces, {
    height: high + low + 70, barmode: "stack", bargap: run.rounds > 60 ? 0 : 0.15, hovermode: "closest",
    margin: { l: 50, r: 8, t: 20, b: 50 },
    // Plotly misplaces the title of an axis below two charts when it draws again.
    annotations: [{ text: "round", font: { size: 14 }, x: 0.4, y: 0, xref: "paper", yref: "paper", yshift: -38, yanchor: "middle", showarrow: false }],
    xaxis: { domain: [0, 0.8], range: [0.5, Math.max(run.rounds, 1) + 0.5], anchor: withParts ? "y2" : "y", showgrid: false },
    yaxis: { domain: [withParts ? bottom : 0, 1], title: { text: "device" }, range: [-0.5, run.devices - 0.5], showgrid: false, zeroline: false },
    xaxis3: { domain: [0.84, 1], anchor: "y", title: { text: "rounds" }, rangemode: "tozero" },
    ...(withParts ? { yaxis2: { domain: [0, bottom - 0.05], title: { text: "round time (s)" } } } : {}),
  });
  drawPartition(run);
  drawSetup(data.rasters.setups[run.setup]);
}

function heatmap(run, scheduled, rounds, devices) {
  const found = run[state.by];
  const [label, unit] = data.quantities[state.by] ?? ["scheduled", ""];
  const levels = found ? bytes(found.levels) : scheduled;
  const value = (i) => (found ? found.low + (levels[i] / 255) * (found.high - found.low) : 1);
  return {
    type: "heatmap", x: rounds, y: devices, colorscale: "Viridis", xgap: run.rounds > 150 ? 0 : 1, ygap: run.devices > 60 ? 0 : 1,
    z: devices.map((device) => rounds.map((_, round) => {
      const i = round * run.devices + device;
      return scheduled[i] ? value(i) : null;
    })),
    colorbar: {
      title: { text: named(label, unit), side: "top" }, orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom",
      len: 0.6, thickness: 8, outlinewidth: 0, nticks: 5,
    },
    hovertemplate: `round %{x}, device %{y}<br>${label} %{z:.4~g} ${unit}<extra></extra>`, hoverongaps: false,
  };
}

function timesBars(run, devices, times) {
  const last = devices.map((device) => (run.last ?? []).filter((value) => value === device).length);
  const bar = (x, ink, what) => ({
    type: "bar", orientation: "h", x, y: devices, xaxis: "x3", yaxis: "y", marker: { color: ink },
    customdata: times, hovertemplate: `device %{y}: ${what}<extra></extra>`,
  });
  const others = bar(times.map((value, i) => value - last[i]), TIMES.others[1], "took part in %{customdata} rounds");
  return run.last ? [bar(last, TIMES.last[1], "finished last in %{x} of %{customdata} rounds"), others] : [others];
}

function drawPartition(run) {
  const counts = data.rasters.partitions[run.partition];
  if (!counts) return;
  const labels = counts[0].map((_, label) => label);
  plot(by("partition"), [{
    type: "heatmap", x: counts.map((_, device) => device), y: labels, z: labels.map((label) => counts.map((row) => row[label] || null)),
    colorscale: "Cividis", xgap: 1, ygap: 1, zmin: 0, zmax: Math.max(...counts.flat()), colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0 },
    hovertemplate: "device %{x}, label %{y}: %{z} samples<extra></extra>", hoverongaps: false,
  }], {
    height: 110 + 16 * Math.max(labels.length, 6),
    xaxis: { title: { text: "device" }, showgrid: false, zeroline: false }, yaxis: { title: { text: "label" }, dtick: labels.length > 20 ? undefined : 1, showgrid: false, zeroline: false },
  });
}

// Settings.

function legend(id, entries) {
  by(id).replaceChildren(...entries.map(([label, ink]) => {
    const key = element("i");
    key.style.background = ink;
    return element("span", {}, key, label);
  }));
}

function describe(id, entries) {
  by(id).replaceChildren(...entries.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: plain(value) })]));
}

function plain(value) {
  if (typeof value !== "number") return String(value);
  return value >= 1 && value < 1e15 ? value.toLocaleString("en", { maximumFractionDigits: 2 }) : String(value);
}

function drawAbout() {
  const about = { ...data.about };
  const versions = about.versions ? Object.entries(JSON.parse(about.versions)).map((entry) => entry.join(" ")).join(", ") : "unknown";
  describe("about", [...Object.entries(data.constant), ...Object.entries({ ...about, versions })]);
  by("title").textContent = `fcjax: ${data.runs.length} ${data.runs.length === 1 ? "run" : "runs"}${data.constant.dataset ? ` on ${data.constant.dataset}` : ""}`;
  by("subtitle").textContent = Object.entries(data.constant).filter(([name]) => name !== "dataset").map((entry) => entry.join(" ")).join(" · ");
  by("notes").replaceChildren(...data.notes.map((note) => element("li", { textContent: note })));
}

function drawSetup(setup) {
  const shown = (value) => (value === null ? "none" : Array.isArray(value) ? `${Math.min(...value)} to ${Math.max(...value)}, by device` : plain(value));
  const parts = setup ? ["cell", "training"] : [];
  describe("setup", parts.flatMap((part) => Object.entries(setup[part])
    .filter(([name]) => name !== "num_samples").map(([name, value]) => [`${part}.${name}`, shown(value)])));
}

function draw() {
  const cells = shownCells();
  for (const made of document.querySelectorAll(".swatch")) {
    made.style.borderTopColor = lineColour(made.dataset.line);
    made.style.borderTopStyle = dash(made.dataset.line) === "solid" ? "solid" : "dashed";
  }
  drawCurves(cells);
  drawPairs(cells);
  drawMeans(cells);
  drawParts(cells);
  drawFairness(cells);
  drawRuns();
  drawRun();
}

filters();
linesLegend();
choose("curve-x", Object.fromEntries(Object.keys(data.cells[0].curves).map((name) => [name, `by ${name}`])), "x", drawCurves);
choose("curve-kind", KINDS, "kind", drawCurves);
choose("pair-metric", Object.fromEntries(Object.entries(data.compared).map(([name, [label]]) => [name, label])), "metric", drawPairs);
choose("raster-by", Object.fromEntries(Object.entries(data.quantities).map(([name, [label]]) => [name, label])), "by", drawRun);
by("pair-base").replaceChildren(...data.lines.map((line, value) => element("option", { value, textContent: line })));
by("pair-base").onchange = (event) => { state.base = Number(event.target.value); drawPairs(shownCells()); };
legend("parts-legend", Object.values(PARTS));
legend("raster-legend", [...("computing_s" in data.columns ? Object.values(PARTS) : []), ...Object.values(TIMES)]);
drawAbout();
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
