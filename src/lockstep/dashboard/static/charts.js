/* Curves of a run and lanes of its workers, as SVG. */
import { draw, finite, make, short, show, swatch } from "./dom.js";

const W = 372, H = 178, LEFT = 42, RIGHT = 10, TOP = 10, BOTTOM = 22;
export const CURVES = [
  { title: "Reward", series: [{ key: "reward", name: "mean", color: "blue" }], band: "reward_std", atLeast: 1 },
  { title: "Solved", series: [{ key: "solved", name: "share", color: "green" }], high: 1 },
  { title: "Mismatch KL", log: true, series: [{ key: "mismatch_kl", name: "all", color: "violet" }] },
  { title: "Entropy", series: [{ key: "entropy", name: "mean", color: "amber" }] },
  { title: "Versions behind", series: [{ key: "off_policy", name: "mean", color: "violet" }, { key: "off_policy_max", name: "most", color: "amber" }] },
  { title: "Tokens per second", series: [{ key: "tokens_per_second", name: "sampled", color: "blue" }] },
  { title: "Step time", unit: " s", stack: true, series: [{ key: "time/rollout", name: "rollout", color: "blue" }, { key: "time/train", name: "train", color: "violet" }, { key: "time/save", name: "save", color: "green" }, { key: "time/update", name: "update", color: "amber" }] },
  { title: "Gradient norm", series: [{ key: "grad_norm", name: "norm", color: "blue" }] },
  { title: "Pause per update", unit: " s", series: [{ key: "pause_seconds", name: "pause", color: "amber" }] },
];

export function ticks(low, high) {
  const raw = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(k => k >= raw);
  const marks = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) marks.push(+at.toPrecision(12));
  return marks;
}

/* Every chart of `specs` that `data` has a series for; hovering over one shows the same step in all. */
export function drawCharts(container, data, specs = CURVES) {
  const hovers = [];
  const figures = specs.map(spec => chart(data, spec, hovers)).filter(Boolean);
  container.replaceChildren(...figures);
  hovers.forEach(each => each(null));
}

/* Whether every logprob of the trainer was the engine's. Counted token by token: a mean can round to 0. Older runs have no counts. */
export function equality(data) {
  const kl = finite(data.series.mismatch_kl ?? []), total = name => finite(data.series[name] ?? []).reduce((sum, value) => sum + value, 0);
  if (!data.series.compared_logprobs) return { all: kl.every(value => value === 0), text: "tokens were not counted" };
  const compared = total("compared_logprobs"), unequal = total("unequal_logprobs"), say = count => count.toLocaleString("en");
  return { all: unequal === 0, text: unequal ? `${say(unequal)} of ${say(compared)} tokens differ` : `all ${say(compared)} tokens bit for bit` };
}

function chart(data, spec, hovers) {
  const first = data.steps[0], last = data.steps[data.steps.length - 1];
  const xOf = step => LEFT + (W - LEFT - RIGHT) * (last === first ? .5 : (step - first) / (last - first));
  const series = spec.series.filter(each => data.series[each.key]);
  if (!series.length) return null;
  const columns = series.map(each => data.series[each.key]);
  /* the other of two compared runs, at the steps of this one */
  const others = data.other && !spec.stack ? series.map(each => data.steps.map(step => data.other.series[each.key]?.[data.other.steps.indexOf(step)])) : [];
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": spec.title });
  const readout = make("span", { class: "readout" });
  const legend = make("div", { class: "legend" });
  if (series.length > 1) legend.append(...series.map(each => swatch(each.name, each.color)));
  const odd = columns.flat().filter(value => typeof value === "string").length;
  if (odd) legend.append(make("span", { class: "differs" }, `${odd} values are not finite`));

  const all = finite(columns.concat(others).flat()), base = H - BOTTOM, zero = spec.log && all.every(value => value === 0);
  const log = spec.log && !zero;
  let low, high, marks, place;
  if (log) {
    const positive = all.filter(value => value > 0);
    low = Math.floor(Math.log10(Math.min(...positive))) - 1; high = Math.ceil(Math.log10(Math.max(...positive)) + 1e-9);
    marks = []; for (let e = low + 1; e <= high; e += Math.ceil((high - low) / 5)) marks.push(e);
    place = value => base - (base - TOP) * ((value > 0 ? Math.log10(value) : low) - low) / (high - low);
  } else {
    const sums = spec.stack ? data.steps.map((_, i) => columns.reduce((sum, c) => sum + (+c[i] || 0), 0)) : all;
    low = spec.low ?? 0; high = spec.high ?? Math.max(...sums, 0) * 1.06;
    if (spec.atLeast) high = Math.max(spec.atLeast, ...sums);
    if (!(high > low)) high = low + 1;
    marks = ticks(low, high);
    place = value => base - (base - TOP) * Math.min(1, Math.max(0, (value - low) / (high - low)));
  }
  for (const mark of marks) {
    const y = log ? place(10 ** mark) : place(mark);
    svg.append(draw("line", { x1: LEFT, x2: W - RIGHT, y1: y, y2: y, stroke: "var(--grid)" }));
    if (!zero) svg.append(draw("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, log ? `1e${mark}` : short(mark)));
  }
  if (log) svg.append(draw("text", { x: LEFT - 6, y: base + 4, "text-anchor": "end" }, "0"));
  svg.append(draw("line", { x1: LEFT, x2: W - RIGHT, y1: base, y2: base, stroke: "var(--line)" }));
  for (const step of [...new Set([first, Math.round((first + last) / 2), last])])
    svg.append(draw("text", { x: xOf(step), y: H - 6, "text-anchor": step === last && last !== first ? "end" : "middle" }, step === first ? `step ${step}` : String(step)));
  for (const event of data.events) if (event.kind.startsWith("worker_")) {
    const x = xOf(stepAt(data, event.at)), back = event.kind === "worker_back";
    const line = draw("line", { x1: x, x2: x, y1: TOP, y2: base, "stroke-dasharray": "3 3", stroke: back ? "var(--green)" : "var(--red)" });
    line.append(draw("title", {}, event.text)); svg.append(line);
  }
  const parts = data.other?.parts;
  if (parts >= first && parts <= last) {
    const line = draw("line", { x1: xOf(parts), x2: xOf(parts), y1: TOP, y2: base, stroke: "var(--amber)", "stroke-width": 3 });
    line.append(draw("title", {}, `the runs part at step ${parts}`)); svg.append(line);
  }
  const path = values => values.map((value, i) => typeof value !== "number" ? "" :
    `${i && typeof values[i - 1] === "number" ? "L" : "M"}${xOf(data.steps[i]).toFixed(1)},${place(value).toFixed(1)}`).join("");
  if (zero) svg.append(draw("text", { class: "zero halo", x: (W + LEFT) / 2, y: base / 2 + 4, "text-anchor": "middle" }, equality(data).all ? "exactly 0" : "0"),
    draw("text", { class: "halo", x: (W + LEFT) / 2, y: base / 2 + 24, "text-anchor": "middle" }, equality(data).text));
  if (spec.stack) {
    const width = Math.max(1.5, (W - LEFT - RIGHT) / data.steps.length * .72);
    data.steps.forEach((step, i) => { let sum = 0; series.forEach((each, k) => {
      const value = +columns[k][i] || 0, y = place(sum + value);
      svg.append(draw("rect", { x: Math.min(Math.max(xOf(step) - width / 2, LEFT), W - RIGHT - width), y, width, height: Math.max(0, place(sum) - y), fill: `var(--${each.color})` }));
      sum += value; }); });
  } else series.forEach((each, k) => {
    if (others[k]) svg.append(draw("path", { class: "other", d: path(others[k]), fill: "none", stroke: `var(--${each.color})`, "stroke-width": 1, opacity: .7 }));
    if (spec.band && data.series[spec.band]) {
      const up = columns[k].map((value, i) => value + data.series[spec.band][i]);
      const down = columns[k].map((value, i) => value - data.series[spec.band][i]);
      const back = data.steps.map((step, i) => `L${xOf(step).toFixed(1)},${place(down[i]).toFixed(1)}`).reverse().join("");
      if (up.concat(down).every(Number.isFinite)) svg.append(draw("path", { d: path(up) + back + "Z", fill: `var(--${each.color}-wash)` }));
    }
    svg.append(draw("path", { d: path(columns[k]), fill: "none", stroke: `var(--${each.color})`, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (data.steps.length === 1 && typeof columns[k][0] === "number") svg.append(draw("circle", { cx: xOf(first), cy: place(columns[k][0]), r: 3, fill: `var(--${each.color})` }));
  });
  const cross = draw("line", { y1: TOP, y2: base, stroke: "var(--soft)", visibility: "hidden" });
  const dots = series.map(each => draw("circle", { r: 3.5, fill: `var(--${each.color})`, stroke: "var(--card)", visibility: "hidden" }));
  svg.append(cross, ...(spec.stack || zero ? [] : dots));
  hovers.push(index => {
    const at = index ?? data.steps.length - 1, x = xOf(data.steps[at]);
    readout.textContent = (index === null ? "last " : `step ${data.steps[at]}: `) + (spec.stack ? [columns.reduce((sum, c) => sum + (+c[at] || 0), 0)] : columns.map(c => c[at])).map(value => show(value, spec.unit)).join(" · ");
    cross.setAttribute("visibility", index === null ? "hidden" : "visible");
    cross.setAttribute("x1", x); cross.setAttribute("x2", x);
    dots.forEach((dot, k) => { const value = columns[k][at];
      dot.setAttribute("visibility", index === null || typeof value !== "number" ? "hidden" : "visible");
      if (typeof value === "number") { dot.setAttribute("cx", x); dot.setAttribute("cy", place(value)); } });
  });
  const hover = index => hovers.forEach(each => each(index));
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
    const share = Math.min(1, Math.max(0, (x - LEFT) / (W - LEFT - RIGHT))), want = first + share * (last - first);
    let best = 0; data.steps.forEach((step, i) => { if (Math.abs(step - want) < Math.abs(data.steps[best] - want)) best = i; });
    hover(best);
  });
  svg.addEventListener("pointerleave", () => hover(null));
  return make("figure", { class: "card chart" }, make("figcaption", {}, make("b", {}, spec.title), readout), legend, svg);
}

function stepAt(data, at) { // an event between two steps is drawn between them
  const first = data.steps[0], last = data.steps[data.steps.length - 1];
  const index = data.ends.findIndex(end => end >= at);
  if (index < 0) return last;
  const begin = index ? data.ends[index - 1] : 0, span = data.ends[index] - begin || 1;
  return Math.max(first, data.steps[index] - 1 + Math.max(0, at - begin) / span);
}

/* A table of every metric of every step. */
export function drawTable(table, data) {
  const names = Object.keys(data.series);
  const head = make("tr", {}, make("th", { scope: "col" }, "step"), make("th", { scope: "col" }, "version"), ...names.map(name => make("th", { scope: "col" }, name)));
  table.replaceChildren(head, ...data.steps.map((step, i) => make("tr", {}, make("th", { scope: "row" }, String(step)), make("td", {}, data.versions[i]), ...names.map(name => make("td", {}, show(data.series[name][i]))))));
}

/* Updates as bars whose height is their pause, above the lanes of the workers. */
/* One mark per recorded step: audited, differing, or recorded only. */
export function drawChain(container, chain) {
  if (!chain) { container.replaceChildren(make("p", {}, "This run has no chain: it was written by an older version, or not by `lockstep train`.")); return; }
  const count = mark => chain.steps.filter(each => each.mark === mark).length, differs = count("differs");
  container.replaceChildren(
    make("ul", { class: "facts" }, ...[`${chain.records} records`, `head ${chain.head}`, `arithmetic ${chain.fingerprint || "not recorded"}${chain.mode ? ` (${chain.mode})` : ""}`,
      chain.key ? `signed by ${chain.key}` : "not signed", `${count("audited")} of ${chain.steps.length} steps audited`, ...(differs ? [`${differs} differ`] : [])].map(text => make("li", {}, text))),
    ...chain.breaks.map(text => make("p", { class: "differs" }, text)),
    make("div", { class: "links", role: "img", "aria-label": "Records of the steps" }, ...chain.steps.map(each => make("span", { class: `link ${each.mark}`, title: `step ${each.step}: ${each.mark}, record ${each.digest}` }))));
}

export function drawLanes(container, data) {
  const width = 1130, left = 74, right = 14, bars = 118, lane = 38, lanes = data.lanes;
  const height = bars + 16 + lanes.length * lane + 30;
  const until = Math.max(...data.ends, ...lanes.flatMap(each => each.spans.map(span => span.to)), 1e-9);
  const x = at => left + (width - left - right) * Math.min(at, until) / until;
  const pauses = (data.series.pause_seconds || []).map(value => typeof value === "number" ? value * 1000 : 0);
  const top = Math.max(...pauses, 1e-6) * 1.08, y = value => bars - (bars - 16) * value / top;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Updates and workers over time" });
  for (const mark of ticks(0, top)) svg.append(
    draw("line", { x1: left, x2: width - right, y1: y(mark), y2: y(mark), stroke: "var(--grid)" }),
    draw("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, `${mark} ms`));
  const bar = Math.min(9, Math.max(2, (width - left - right) / Math.max(1, pauses.length) * .4));
  pauses.forEach((pause, i) => {
    const at = x(data.ends[i]);
    const rect = draw("rect", { x: at - bar / 2, y: y(pause), width: bar, height: Math.max(1, bars - y(pause)), rx: 1.5, fill: "var(--amber)" });
    rect.append(draw("title", {}, `step ${data.steps[i]}: version ${data.versions[i]}, paused ${pause.toFixed(2)} ms, update ${show((data.series["time/update"] || [])[i], " s")}`));
    svg.append(rect);
  });
  lanes.forEach((each, k) => {
    const middle = bars + 16 + k * lane + lane / 2;
    svg.append(draw("text", { x: left - 8, y: middle + 4, "text-anchor": "end" }, each.id));
    for (const span of each.spans) {
      const down = span.state !== "serving";
      const rect = draw("rect", { x: x(span.from), y: middle - 8, width: Math.max(1, x(span.to) - x(span.from)), height: 16, rx: 3,
        fill: down ? "var(--red)" : "var(--green)", opacity: down ? .9 : .35 });
      rect.append(draw("title", {}, `${each.id} ${span.state} from ${span.from.toFixed(1)} s to ${span.to.toFixed(1)} s`));
      svg.append(rect);
      if (down) svg.append(draw("text", { x: (x(span.from) + x(span.to)) / 2, y: middle - 12, "text-anchor": "middle", style: "fill:var(--red);font-weight:600" }, `down ${(span.to - span.from).toFixed(1)} s`));
      else data.ends.forEach(end => { if (end >= span.from && end <= span.to) svg.append(
        draw("line", { x1: x(end), x2: x(end), y1: middle - 8, y2: middle + 8, stroke: "var(--green)" })); });
    }
  });
  const foot = bars + 16 + lanes.length * lane + 16;
  for (const mark of ticks(0, until)) svg.append(draw("text", { x: x(mark), y: foot, "text-anchor": "middle" }, `${mark} s`));
  const legend = make("div", { class: "legend" }, swatch("pause of one update", "amber"), swatch("serving; a tick is a new version", "green"), swatch("down", "red"));
  container.replaceChildren(legend, make("div", { class: "scroll" }, svg));
}

/* A small curve of [time, value] points, at most the last `most` seconds until `now`. */
export function sparkline(points, now, most, color = "blue", width = 120, height = 28) {
  const recent = points.filter(([at]) => at >= now - most - 2);
  const span = Math.min(most, Math.max(20, now - (recent[0]?.[0] ?? now)));
  const top = Math.max(1e-9, ...recent.map(([, value]) => value));
  const x = at => width * (1 - (now - at) / span), y = value => height - 2 - (height - 4) * value / top;
  const line = recent.map(([at, value], i) => `${i ? "L" : "M"}${Math.max(0, x(at)).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (recent.length > 1) svg.append(
    draw("path", { d: `${line}L${width},${height}L${Math.max(0, x(recent[0][0])).toFixed(1)},${height}Z`, fill: `var(--${color})`, opacity: .12 }),
    draw("path", { d: line, fill: "none", stroke: `var(--${color})`, "stroke-width": 1.5, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" }));
  return svg;
}
