/* A running training run: the curves, lanes and conversations of its report. */
import { drawChain, drawCharts, drawLanes, drawTable, equality } from "./charts.js";
import { clock, make, show } from "./dom.js";
import { tile } from "./fleet.js";
import { read, state } from "./state.js";
import { packedSource, TokenView } from "./tokens.js";

export class TrainingView {
  constructor() {
    this.root = make("div"); this.size = null; this.step = null;
  }

  update() {
    const run = state.run;
    if (!run) { if (state.at && this.size !== -1) { this.size = -1; this.empty("No run is attached", "Start the gateway with ", make("code", {}, "--run-dir DIR"), ", or run ", make("code", {}, "lockstep dashboard --run DIR"), " while it runs."); } return; }
    const mark = `${run.name} ${run.size}`;
    if (mark === this.size || this.loading) return;
    this.size = mark; this.loading = true;
    this.load().catch(error => this.empty("This run cannot be read", error.message)).finally(() => { this.loading = false; });
  }

  empty(title, ...text) { this.frame = null; this.root.replaceChildren(make("h1", {}, title), make("div", { class: "card empty" }, ...text)); }

  async load() {
    const { about, curves, chain } = await read("run");
    if (!curves) { this.empty(state.run.name, "The run has not finished its first step yet."); return; }
    if (!this.frame) this.build();
    const last = curves.steps.length - 1, of = name => curves.series[name]?.[last];
    this.title.textContent = `${about.env ?? state.run.name} on ${String(about.model ?? "an unnamed model").split("/").pop()}`;
    this.facts.replaceChildren(...[`step ${curves.steps[last]}`, ...(about.ended ? [`ended ${clock(about.ended)}`] : ["running"]), `version ${curves.versions[last]}`].map(text => make("li", {}, text)));
    const mismatch = curves.series.mismatch_kl ?? [], worst = Math.max(0, ...mismatch.filter(value => typeof value === "number"));
    const equal = equality(curves);
    this.tiles.replaceChildren(
      tile("Reward", show(of("reward")), `step ${curves.steps[last]}; first ${show(curves.series.reward?.[0])}`),
      tile("Mismatch KL", equal.all ? "exactly 0" : show(worst), equal.all ? equal.text : `largest of any step; ${equal.text}`, null, worst > 1e-3 ? "red" : "green"),
      tile("Entropy", show(of("entropy")), "of the last step"),
      tile("Versions behind", show(of("off_policy")), `mean; most ${show(of("off_policy_max"))}`),
      tile("Step time", show(of("time/step"), " s"), `pause ${show((of("pause_seconds") ?? 0) * 1000, " ms")}`));
    drawCharts(this.charts, curves); drawLanes(this.lanes, curves); drawChain(this.links, chain); drawTable(this.table, curves);
    this.events.replaceChildren(...curves.events.slice(-12).map(event => make("li", {}, make("time", {}, `${event.at.toFixed(1)} s`), " ", event.text)));
    if (this.follows) await this.samples(null);
  }

  build() {
    this.frame = true; this.follows = true;
    this.title = make("h1"); this.facts = make("ul", { class: "facts" }); this.tiles = make("section", { class: "tiles five" });
    this.charts = make("section", { class: "charts" }); this.lanes = make("section", { class: "card chart" }); this.links = make("section", { class: "card chart" }); this.table = make("table");
    this.events = make("ol", { class: "events" });
    this.tokens = new TokenView();
    this.select = make("select", { "aria-label": "Step" }); this.select.onchange = () => { this.follows = this.select.selectedIndex === this.select.options.length - 1; this.samples(this.select.value); };
    this.list = make("ul", { class: "list", "aria-label": "Conversations" });
    this.root.replaceChildren(this.title, this.facts, this.tiles, this.charts, make("details", {}, make("summary", {}, "The same as a table"), make("div", { class: "scroll card" }, this.table)),
      make("h2", {}, "Updates and workers"), this.lanes, this.events, make("h2", {}, "The chain"), this.links, make("h2", {}, "Token by token"),
      make("section", { class: "card reader run" }, make("div", { class: "controls" }, make("label", {}, "Step ", this.select), this.tokens.controls), make("div", { class: "pane" }, this.list, this.tokens.stream, this.tokens.detail)));
  }

  async samples(step) {
    const data = await read(`run/samples${step === null ? "" : `?step=${step}`}`);
    this.select.replaceChildren(...data.steps.map(each => make("option", { value: each }, String(each)))); this.select.value = data.step;
    this.list.replaceChildren(...data.samples.map(sample => {
      const button = make("button", { type: "button" }, make("span", {}, `reward ${show(sample.reward)}`), make("b", {}, `A ${show(sample.advantage)}`), make("small", {}, `${sample.tokens.length} tokens${sample.workers.length ? `, ${sample.workers.join(", ")}` : ""}`));
      button.onclick = () => { this.follows = false; this.open(button, sample, data.names); };
      return make("li", {}, button);
    }));
    const first = this.list.querySelector("button");
    if (first) await this.open(first, data.samples[0], data.names); else await this.tokens.open(null);
  }

  async open(button, sample, names) {
    for (const each of this.list.querySelectorAll("button")) each.setAttribute("aria-current", String(each === button));
    await this.tokens.open(packedSource(sample, names));
  }
  close() { this.tokens?.close(); }
}
