/* The gateway process: latency, errors, slow requests, store and memory. */
import { sparkline } from "./charts.js";
import { bytes, count, make, seconds } from "./dom.js";
import { tile } from "./fleet.js";
import { history, SPAN, state } from "./state.js";

export class HealthView {
  constructor() {
    this.tiles = make("section", { class: "tiles", "aria-label": "Figures" });
    this.routes = make("table", { class: "rows" });
    this.slow = make("div", { class: "card x" });
    this.store = make("table", { class: "rows tight" });
    this.root = make("div", {}, make("h1", {}, "Gateway health"), this.tiles, make("h2", {}, "Routes"), make("div", { class: "card x" }, this.routes),
      make("div", { class: "columns" }, make("section", {}, make("h2", {}, "Slow requests"), this.slow), make("section", {}, make("h2", {}, "Sessions and store"), make("div", { class: "card x" }, this.store))));
  }

  update(parts) {
    const health = state.health;
    if (!health || !parts.has("health") && this.drawn) return;
    this.drawn = true;
    const loop = health.loop_p99, late = loop > .1;
    this.tiles.replaceChildren(
      tile("Requests per second", count(health.rate), "over the last 10 s", sparkline(history.requests, state.at, SPAN)),
      tile("Errors per second", health.errors ? health.errors.toFixed(1) : "0", "status 429 and above", sparkline(history.errors, state.at, SPAN, "red"), health.errors ? "red" : ""),
      tile("Latency", health.p50 === null ? "–" : seconds(health.p50), health.p95 === null ? "no recent requests" : `median; 95 % within ${seconds(health.p95)}`, sparkline(history.latency, state.at, SPAN, "violet")),
      tile("Queue", count(state.fleet?.waiting ?? 0), `${count(state.fleet?.in_flight ?? 0)} in flight`),
      tile("Loop delay", loop === null ? "–" : seconds(loop), health.loop_worst === null ? "" : `99 %; worst ${seconds(health.loop_worst)}`, sparkline(history.loop, state.at, SPAN, "amber"), late ? "amber" : ""),
      tile("CPU", `${Math.round(health.cpu * 100)} %`, `of one core; ${count(health.tasks)} tasks`),
      tile("Sessions", count(health.store.live), `${bytes(health.store.bytes)} stored, ${count(health.store.turns)} turns since the start`),
      tile("Memory", bytes(health.memory), `${health.viewers} page${health.viewers === 1 ? "" : "s"} open`, sparkline(history.memory, state.at, SPAN, "green")));
    const head = (...names) => make("tr", {}, ...names.map(([name, kind]) => make("th", { class: kind, scope: "col" }, name)));
    this.routes.replaceChildren(head(["Route"], ["Requests/s", "num"], ["Errors/s", "num"], ["Median", "num wide"], ["95 %", "num"], ["Since the start", "num wide"]),
      ...health.routes.slice(0, 14).map(row => make("tr", {}, make("td", { class: "mono" }, row.route), make("td", { class: "num" }, row.rate.toFixed(1)),
        make("td", { class: "num" }, row.errors ? make("span", { class: "differs" }, row.errors.toFixed(1)) : "0"), make("td", { class: "num wide" }, seconds(row.p50)), make("td", { class: "num" }, seconds(row.p95)), make("td", { class: "num wide" }, count(row.total)))));
    this.slow.replaceChildren(health.slow.length ? make("table", { class: "rows" }, head(["Worker"], ["Session"], ["Behind", "num"], ["For", "num"]),
      ...health.slow.map(row => make("tr", {}, make("td", {}, row.worker), make("td", {}, row.session ? make("a", { href: `#/sessions/${encodeURIComponent(row.session)}` }, row.session) : "–"), make("td", { class: "num" }, String(row.behind)), make("td", { class: "num" }, seconds(row.seconds)))))
      : make("div", { class: "empty" }, "No request has been at a worker for more than 2 s."));
    const size = name => name.endsWith("bytes") ? bytes : count, names = { live: "sessions stored", bytes: "bytes stored", hot: "sessions in memory", hot_bytes: "bytes in memory", turns: "turns stored", opened: "sessions opened", loaded: "sessions loaded", unwritten: "turns not stored" };
    this.store.replaceChildren(...Object.entries(health.store).filter(([name, value]) => value || ["live", "turns", "bytes", "unwritten"].includes(name))
      .map(([name, value]) => make("tr", {}, make("td", {}, names[name] ?? name.replace("_", ": ").replace(/_/g, " ")), make("td", { class: "num" }, size(name)(value)))));
  }
  close() {}
}
