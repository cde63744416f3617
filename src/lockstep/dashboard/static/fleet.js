/* The fleet: a lane for every worker, and its updates. */
import { sparkline } from "./charts.js";
import { ago, bytes, clock, count, digits, draw, make, seconds, swatch } from "./dom.js";
import { history, SPAN, state } from "./state.js";

const TONES = { serving: "green", held: "blue", syncing: "blue", proving: "violet", joining: "blue", down: "red", quarantined: "amber", draining: "" };
const PHASES = { baseline: "violet", stage: "blue", prove: "violet", quiesce: "amber", commit: "green", resume: "soft", rollback: "red" };
const NAMES = { baseline: "score before", quiesce: "pause" };
const MARK = 16;

export class FleetView {
  constructor() {
    this.head = make("section");
    this.tiles = make("section", { class: "tiles", "aria-label": "Figures" });
    this.lanes = make("section", { class: "card lanes", "aria-label": "Workers" });
    this.updates = make("section", { class: "card updates", "aria-label": "Updates" });
    this.root = make("div", {}, this.head, this.tiles, make("h2", {}, "Workers"), this.lanes,
      make("h2", {}, "Operations"), this.updates,
      make("div", { class: "legend" }, ...["stage", "prove", "quiesce", "commit", "resume"].map(name => swatch(NAMES[name] || name, PHASES[name]))));
    this.rows = new Map();
  }

  update(parts) {
    if (parts.has("fleet") || parts.has("workers")) this.drawHead();
    if (parts.has("workers") || parts.has("operations")) this.drawLanes();
    if (parts.has("operations") || parts.has("fleet")) this.drawUpdates();
  }
  tick() { if (state.at) { state.at = Math.max(state.at, Date.now() / 1000); this.drawLanes(); this.drawUpdates(); } }

  drawHead() {
    const fleet = state.fleet;
    if (!fleet) return;
    const adapters = Object.entries(fleet.adapters).map(([name, label]) => `adapter ${name} ${label}`);
    this.head.replaceChildren(make("h1", {}, `${fleet.model ?? "No model"} at `, make("span", { id: "version" }, fleet.version ?? "–")),
      make("ul", { class: "facts" }, ...[`${fleet.serving} of ${fleet.workers} workers serving`, ...(fleet.paused ? [`paused (${fleet.paused})`] : []), ...(fleet.role === "alone" ? [] : [`this gateway ${fleet.role === "leader" ? "leads" : `follows ${fleet.leader || "no leader yet"}`}`, `gateways: ${fleet.gateways}`]), ...adapters].map(text => make("li", {}, text))));
    const behind = new Map();
    for (const row of state.workers.values()) for (const [versions, requests] of Object.entries(row.behind)) behind.set(+versions, (behind.get(+versions) || 0) + requests);
    const worst = Math.max(0, ...behind.keys()), stale = [...behind].filter(([versions]) => versions > 0).reduce((sum, [, requests]) => sum + requests, 0);
    const update = [...state.operations.values()].filter(each => each.kind === "update_weights" && each.ended).sort((a, b) => b.ended - a.ended)[0];
    this.tiles.replaceChildren(
      tile("Tokens per second", count(fleet.rate), "sampled, over the last 5 s", sparkline(history.rate, state.at, SPAN)),
      tile("In flight", count(fleet.in_flight), fleet.waiting ? `${count(fleet.waiting)} queued` : "none queued", sparkline(history.flight, state.at, SPAN, "violet")),
      tile("Staleness", worst ? `${worst} behind` : "0 behind", stale ? `${count(stale)} requests began on older weights` : "all requests in flight started on this version", null, worst ? "amber" : "green"),
      tile("Last update", update ? seconds(update.pause_seconds) : "–", update ? `pause of ${update.version}, ${ago(update.ended)}` : "none since the start", null, update && update.status !== "done" ? "red" : ""));
  }

  drawLanes() {
    if (!this.rows.size && !state.workers.size) {
      this.lanes.replaceChildren(make("div", { class: "empty" }, "No worker has joined."));
      return;
    }
    if (!this.rows.size) this.lanes.replaceChildren(make("div", { class: "lane head" }, ...["Worker", "The last minutes", "Version", "In flight", "Tokens/s", "Last proof"].map(text => make("span", { class: text === "In flight" ? "num" : "" }, text))));
    for (const [id, row] of this.rows) if (!state.workers.has(id)) { row.root.remove(); this.rows.delete(id); }
    for (const [id, worker] of state.workers) {
      let row = this.rows.get(id);
      if (!row) this.rows.set(id, row = this.newRow(id));
      this.fill(row, worker);
    }
  }

  newRow(id) {
    const cell = (kind, tag = "span") => make(tag, { class: kind });
    const row = { name: cell("id"), gpus: cell("muted small gpus"), chip: cell("chip"), strip: cell("strip"), version: cell("version mono"), flight: cell("flight num"), rate: cell("rate"), proof: cell("proof"), reason: cell("reason") };
    row.root = make("div", { class: "lane", "data-worker": id }, make("span", { class: "chips" }, row.name, row.gpus, row.chip), row.strip, row.version, row.flight, row.rate, row.proof, row.reason);
    row.name.textContent = id;
    this.lanes.append(row.root);
    return row;
  }

  fill(row, worker) {
    const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };
    text(row.gpus, worker.gpus.length ? `GPU ${worker.gpus.join(", ")}` : ""); row.name.title = worker.gpus.length ? `${worker.id} on GPU ${worker.gpus.join(", ")}` : worker.id;
    text(row.chip, worker.state); row.chip.className = `chip ${TONES[worker.state] ?? ""}`; row.chip.title = `for ${seconds(state.at - worker.since)}${worker.backend ? `, ${worker.backend}` : ""}`;
    text(row.version, worker.version ?? "–"); row.version.title = worker.version ?? "";
    text(row.flight, count(worker.in_flight));
    row.rate.replaceChildren(sparkline(history.workers.get(worker.id)?.rate ?? [], state.at, SPAN, "blue", 60, 22), make("span", { class: "num" }, count(worker.rate)));
    row.proof.replaceChildren(...proof(worker.evidence, worker.judged));
    const why = worker.state === "serving" ? "" : worker.reason ?? "";
    text(row.reason, why && worker.next_try !== null ? `${why} · next try ${worker.next_try > 0 ? `in ${worker.next_try} s` : "now"}` : why);
    row.reason.className = `reason${worker.state === "down" || worker.state === "quarantined" ? "" : " wait"}`; row.reason.hidden = !why;
    row.strip.replaceChildren(strip(worker.id)); row.strip.title = `the last ${seconds(shown(state.at))}`;
  }

  drawUpdates() {
    const rows = [...state.operations.values()].sort((a, b) => b.started - a.started).slice(0, 12);
    this.updates.replaceChildren(...(rows.length ? rows.map(operation) : [make("div", { class: "empty" }, "No operations yet. Updates, pauses and adapter loads appear here with their phases.")]));
  }
}

export function tile(name, value, note, spark = null, tone = "") {
  return make("div", { class: `tile ${tone}` }, make("div", { class: "name" }, name), make("div", { class: "value", style: tone ? "color:var(--tone)" : "" }, value), spark, make("div", { class: "note" }, note));
}

function proof(evidence, at) {
  if (!evidence) return [make("span", { class: "muted" }, "not proved by this gateway")];
  const by = { held: "weights read back", bits: "bit for bit", scores: "by logprobs", digest: "by digest", majority: "by majority" }[evidence.decided_by] ?? "undecided";
  const delta = evidence.max_difference === null ? "" : evidence.max_difference === 0 ? "max |Δ| 0" : `max |Δ| ${digits(+evidence.max_difference.toPrecision(2))}`;
  return [make("span", { title: `${evidence.scope ? `${evidence.scope}; ` : ""}digest ${evidence.digest}${evidence.bound === null ? "" : `, allowed ${evidence.bound}`}` }, delta || by), make("br"), make("span", { class: "muted small" }, [delta ? by : "", at ? ago(at) : ""].filter(Boolean).join(" · "))];
}

/* The states of a worker over the last minutes, and its updates. */
function strip(id) {
  const width = 600, now = state.at, span = shown(now), x = at => Math.max(0, width * (1 - (now - at) / span));
  const svg = draw("svg", { viewBox: `0 0 ${width} 30`, preserveAspectRatio: "none", role: "img", "aria-label": `States of ${id}` });
  const states = history.workers.get(id)?.states ?? [];
  states.forEach((each, i) => {
    const from = x(each.at), to = i + 1 < states.length ? x(states[i + 1].at) : width, tone = TONES[each.state] || "soft";
    if (to <= from) return;
    const rect = draw("rect", { x: from, y: 8, width: Math.max(1, to - from), height: 14, fill: `var(--${tone})`, opacity: each.state === "serving" ? .3 : .8 });
    rect.append(draw("title", {}, `${each.state}, version ${each.version ?? "–"}, from ${clock(each.at)}`)); svg.append(rect);
    if (i && states[i - 1].version !== each.version) svg.append(draw("rect", { x: from - 1, y: 4, width: 2, height: 22, fill: "var(--ink)", opacity: .6 }));
  });
  for (const operation of state.operations.values()) {
    const mine = operation.workers[id];
    if (!mine || (operation.ended ?? now) < now - SPAN) continue;
    // As wide as its duration, but wide enough to be visible: most last less than a second.
    const phases = Object.entries(mine.seconds), sum = phases.reduce((total, [, took]) => total + took, 0) || 1;
    const wide = Math.max(MARK, x(operation.started + sum) - x(operation.started));
    let at = Math.min(x(operation.started), width - wide);
    if (at <= 0) continue;
    const mark = draw("g", {}, draw("title", {}, `${operation.kind} ${operation.version ?? ""}: ${phases.map(([phase, took]) => `${NAMES[phase] ?? phase} ${seconds(took)}`).join(", ")}`));
    for (const [phase, took] of phases) { const part = wide * took / sum; mark.append(draw("rect", { x: at, y: 3, width: part, height: 24, fill: `var(--${PHASES[phase] ?? "soft"})` })); at += part; }
    svg.append(mark);
  }
  return svg;
}

/* Seconds that the lanes show: the recorded time, between one minute and five. */
function shown(now) {
  const first = Math.min(now, ...[...history.workers.values()].map(past => past.states[0]?.at ?? now));
  return Math.min(SPAN, Math.max(60, now - first));
}

function operation(each) {
  const running = each.status === "running", took = (each.ended ?? state.at) - each.started;
  const phases = Object.entries(each.phases);
  const sum = phases.reduce((total, [, value]) => total + value, 0);
  const bar = make("div", { class: `phases${running ? " running" : ""}`, title: phases.map(([name, value]) => `${NAMES[name] ?? name} ${seconds(value)}`).join(", ") },
    ...phases.map(([name, value]) => make("i", { style: `flex:${Math.max(value / (sum || 1), .012)};--tone:var(--${PHASES[name] ?? "soft"})` })));
  const failed = Object.entries(each.workers).filter(([, worker]) => worker.error);
  const parts = [
    each.delta_bytes === null ? "" : `a delta of ${bytes(each.delta_bytes)} that changes ${(each.changed * 100).toFixed(2)} % of the values`,
    each.fetched_bytes === null ? "" : `${bytes(each.fetched_bytes)} fetched from a store`,
  ].filter(Boolean).join(", ");
  const notes = [each.error, ...each.warnings, ...(each.error ? [] : failed.map(([id, worker]) => `${id}: ${worker.error}`))].filter(Boolean);
  return make("div", { class: "update", "data-operation": each.id },
    make("span", { class: "muted small" }, clock(each.started)),
    make("span", {}, make("b", { class: "mono" }, each.version ?? each.kind.replace(/_/g, " ")), " ", make("span", { class: "muted small kind" }, each.version ? each.kind.replace(/_/g, " ") : "")),
    bar, make("span", { class: "num small bytes", title: parts }, each.nbytes === null ? seconds(took) : each.delta_bytes === null ? bytes(each.nbytes) : `Δ ${bytes(each.delta_bytes)}`),
    make("span", { class: "num small bytes" }, each.pause_seconds === null ? "" : `pause ${seconds(each.pause_seconds)}`),
    make("span", { class: "num" }, make("span", { class: `chip ${{ done: "green", running: "blue", failed: "red", lost: "amber" }[each.status]}` }, each.status)),
    ...(notes.length ? [make("span", { class: "err" }, notes.join(" · "))] : []));
}
