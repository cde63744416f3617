/* The token view: a conversation token by token. Only what is near the window is in the page.

A source has `total`, `segments` ([author, start, end, label] in order) and `read(start, end)`, which
gives the tokens or promises them: {id, text, role, version, own, logprob} and, where they are known,
{difference, mask, turn, support}. `facts(token)` may add rows to what is said about a token. */
import { digits, listed, make, show, swatch } from "./dom.js";

const BLOCK = 256, PAGE = 2048;
const ROLES = ["system", "user", "assistant", "tool", "template"];
const PAINTS = {
  role: { name: "author", legend: ROLES.map(role => [role, role]), color: token => ROLES.includes(token.role) ? token.role : "template" },
  logprob: { name: "logprob", legend: [["above −0.01", "l0"], ["−0.1", "l1"], ["−0.5", "l2"], ["−2", "l3"], ["below −2", "l4"]],
    color: token => { if (!token.own) return null; const p = token.logprob; return p > -.01 ? "l0" : p > -.1 ? "l1" : p > -.5 ? "l2" : p > -2 ? "l3" : "l4"; } },
  difference: { name: "trainer − engine", legend: [["the same number", "d0"], ["below 1e-4", "d1"], ["below 1e-2", "d2"], ["more, or none", "d3"]],
    color: token => { if (!token.own) return null; const d = Math.abs(token.difference); return d === 0 ? "d0" : d < 1e-4 ? "d1" : d < 1e-2 ? "d2" : "d3"; } },
  version: { name: "weight version", legend: [], color: (token, view) => token.version ? `v${view.versionAt(token.version) % 6}` : null },
  mask: { name: "training mask", legend: [["trained here", "d0"], ["sampled, masked", "d3"]], color: token => token.own ? token.mask ? "d0" : "d3" : null },
};

export const spread = runs => runs.flatMap(([value, times]) => Array(times).fill(value));

/* The source of a sample as a run directory holds it, without repetition. */
export function packedSource(sample, names) {
  const roles = spread(sample.roles), versions = spread(sample.versions), sampled = spread(sample.sampled);
  let own = -1;
  const list = sample.tokens.map((token, i) => {
    const [id, text] = names[token], entry = { id, text, role: roles[i], version: versions[i], own: sampled[i] };
    if (entry.own) {
      own += 1; entry.logprob = sample.logprobs[own];
      entry.difference = !sample.scored ? undefined : own in sample.differences ? sample.differences[own] : 0;
    }
    return entry;
  });
  return {
    total: list.length, segments: sample.segments, list,
    paints: ["role", "logprob", "difference", "version"],
    read: (start, end) => list.slice(start, end),
    facts: () => [["reward", show(sample.reward)], ["advantage", show(sample.advantage)], ["worker", sample.workers.join(", ") || "–"]],
  };
}

export class TokenView {
  constructor(onChoose = () => {}) {
    this.paint = "role"; this.chosen = 0; this.source = null; this.versions = []; this.onChoose = onChoose;
    this.select = make("select", { "aria-label": "Colour by" });
    this.legend = make("div", { class: "legend" });
    this.controls = make("div", { class: "paint" }, make("label", {}, "Colour by ", this.select), this.legend);
    this.stream = make("div", { class: "stream", tabindex: "0", role: "group", "aria-label": "Tokens of the conversation" });
    this.detail = make("aside", { class: "detail", "aria-live": "polite" });
    this.select.onchange = () => { this.paint = this.select.value; this.repaint(); };
    this.stream.onclick = event => { const node = event.target.closest("[data-at]"); if (node) this.choose(+node.dataset.at); };
    this.stream.onkeydown = event => this.key(event);
    this.seen = new IntersectionObserver(entries => {
      for (const entry of entries) { entry.target.near = entry.isIntersecting; entry.isIntersecting ? this.render(entry.target) : this.clear(entry.target); }
    }, { root: this.stream, rootMargin: "800px 0px" });
  }

  /* Show a source, or nothing; `at` is the token to select, by default the first sampled one. */
  async open(source, at = null) {
    this.source = source; this.pages = new Map(); this.versions = []; this.seen.disconnect();
    this.blocks = [];
    this.stream.replaceChildren();
    if (!source) { this.detail.replaceChildren(make("p", {}, "No conversation was kept here.")); return; }
    const paints = source.paints || ["role", "logprob", "version", "mask"];
    this.select.replaceChildren(...paints.map(name => make("option", { value: name }, PAINTS[name].name)));
    if (!paints.includes(this.paint)) this.paint = "role";
    this.select.value = this.paint;
    this.addBlocks(0);
    this.showLegend();
    await this.choose(at ?? Math.max(0, await this.nextOwn(-1, 1)), at !== null);
  }

  /* Add the new tokens of a conversation that has grown. */
  extend(source) {
    const known = this.source.total;
    this.source = source;
    for (const key of [...this.pages.keys()]) if ((key + 1) * PAGE > known) this.pages.delete(key);
    const keep = this.blocks.findIndex(block => block.end >= known);
    const from = keep < 0 ? known : this.blocks[keep].start;
    for (const block of this.blocks.splice(keep < 0 ? this.blocks.length : keep)) { this.seen.unobserve(block); block.remove(); }
    this.addBlocks(from);
    this.choose(this.chosen);
  }

  addBlocks(from) {
    const wide = Math.max(200, this.stream.clientWidth || 600);
    for (const [author, start, end, label] of this.source.segments) {
      for (let at = Math.max(start, from); at < end; at += BLOCK) {
        const block = make("div", { class: `seg by-${author}` });
        block.start = at; block.end = Math.min(end, at + BLOCK); block.label = at === start ? label ?? author : "";
        block.style.minHeight = `${Math.ceil((block.end - block.start) * 46 / wide) * 28 + 8}px`;
        this.blocks.push(block); this.stream.append(block); this.seen.observe(block);
      }
    }
  }

  async tokens(start, end) {
    const parts = [];
    for (let page = Math.floor(start / PAGE); page * PAGE < end; page++) {
      if (!this.pages.has(page)) {
        this.pages.set(page, this.source.read(page * PAGE, Math.min(this.source.total, (page + 1) * PAGE)));
        if (this.pages.size > 24) this.pages.delete(this.pages.keys().next().value);
      }
      const list = await this.pages.get(page);
      parts.push(list.slice(Math.max(0, start - page * PAGE), end - page * PAGE));
    }
    return parts.flat();
  }

  async render(block) {
    if (block.firstChild || block.loading) return;
    block.loading = true;
    const source = this.source, tokens = await this.tokens(block.start, block.end);
    block.loading = false;
    // The user may have scrolled past it by now.
    if (!block.near || source !== this.source && !this.blocks.includes(block)) return;
    const body = make("div", { class: "toks" }, ...tokens.map((token, i) => this.node(token, block.start + i)));
    block.replaceChildren(make("span", { class: "who" }, block.label), body);
    block.style.minHeight = "";
  }

  clear(block) {
    if (!block.firstChild) return;
    block.style.minHeight = `${block.offsetHeight}px`;
    block.replaceChildren();
  }

  node(token, at) {
    const color = PAINTS[this.paint].color(token, this);
    const node = make("span", { class: `t${token.own ? " own" : ""}${color ? ` c-${color}` : ""}${at === this.chosen ? " on" : ""}`, "data-at": at, title: `${JSON.stringify(token.text)} · id ${token.id}` });
    // line breaks and blanks are tokens too: show them, and still break the line
    token.text.replace(/\r/g, "␍").replace(/\t/g, "⇥").split(/(\n)/).forEach(part => part === "\n" ? node.append(make("span", { class: "glyph" }, "↵"), "\n") : node.append(part));
    if (token.text === "") node.append(make("span", { class: "glyph" }, token.id === undefined ? "∅" : `#${token.id}`));
    return node;
  }

  versionAt(version) {
    if (!this.versions.includes(version)) { this.versions.push(version); if (this.paint === "version") this.showLegend(); }
    return this.versions.indexOf(version);
  }

  showLegend() {
    const shown = this.paint === "version" ? this.versions.map((version, i) => [version, `v${i % 6}`]) : PAINTS[this.paint].legend;
    this.legend.replaceChildren(...shown.map(([name, color]) => swatch(name, color)));
  }

  repaint() {
    this.showLegend();
    for (const block of this.blocks) if (block.firstChild) { const height = block.offsetHeight; block.replaceChildren(); block.style.minHeight = `${height}px`; this.render(block); }
  }

  async nextOwn(from, by) {
    for (let at = from + by; at >= 0 && at < this.source.total; at += by) {
      const token = (await this.tokens(at, at + 1))[0];
      if (token && token.own) return at;
    }
    return from;
  }

  async choose(at, follow) {
    if (!this.source || !this.source.total) return;
    const source = this.source;
    this.chosen = Math.min(source.total - 1, Math.max(0, at));
    const token = (await this.tokens(this.chosen, this.chosen + 1))[0];
    if (source !== this.source || !token) return;
    for (const node of this.stream.querySelectorAll(".on")) node.classList.remove("on");
    const block = this.blocks.find(each => each.start <= this.chosen && this.chosen < each.end);
    if (follow && block && !block.firstChild) { block.scrollIntoView({ block: "center" }); block.near = true; await this.render(block); }
    const node = this.stream.querySelector(`[data-at="${this.chosen}"]`);
    if (node) { node.classList.add("on"); if (follow) node.scrollIntoView({ block: "nearest" }); }
    this.tell(token);
    this.onChoose(this.chosen, token, follow);
  }

  tell(token) {
    const rows = [["position", `${this.chosen} of ${this.source.total}`], ["token id", String(token.id)], ["written by", token.role], ["sampled", token.own ? "yes" : "no, given"]];
    if (token.own) {
      const same = token.difference === 0, scored = token.difference !== undefined;
      rows.push([scored ? "engine logprob" : "logprob", digits(token.logprob)]);
      if (scored) rows.push(["trainer logprob", typeof token.difference !== "number" ? "not finite" : same ? digits(token.logprob) : digits(+(token.logprob + token.difference).toPrecision(9))],
        ["difference", make("span", { class: same ? "same" : "differs" }, same ? "0, bit for bit" : show(token.difference))]);
      rows.push(["probability", typeof token.logprob === "number" ? (100 * Math.exp(token.logprob)).toPrecision(4) + " %" : "–"]);
      if (typeof token.support === "number") rows.push(["drawn from", token.support === 0 ? "a part of the vocabulary, not recorded" : token.support === 1 ? "1 token" : `${token.support} tokens`]);
      if (token.mask !== undefined) rows.push(["trained", token.mask ? "yes" : "no, masked in this branch"]);
    }
    rows.push(["weights", token.version || "–"]);
    if (token.turn !== undefined) rows.push(["turn", String(token.turn)]);
    const button = (text, name, act) => make("button", { type: "button", "aria-label": name, onclick: act }, text);
    const more = this.source.facts ? this.source.facts(token) : [];
    this.detail.replaceChildren(make("h3", {}, JSON.stringify(token.text)), listed(rows),
      make("div", { class: "nav" }, button("←", "Previous token", () => this.choose(this.chosen - 1, true)), button("→", "Next token", () => this.choose(this.chosen + 1, true)),
        button("⇤", "Previous sampled token", () => this.jump(-1)), button("⇥", "Next sampled token", () => this.jump(1))),
      make("p", {}, "← → one token · ↑ ↓ the next sampled one"), ...(more.length ? [make("hr"), listed(more)] : []));
  }

  async jump(by) { await this.choose(await this.nextOwn(this.chosen, by), true); }

  key(event) {
    const act = { ArrowLeft: () => this.choose(this.chosen - 1, true), ArrowRight: () => this.choose(this.chosen + 1, true), ArrowUp: () => this.jump(-1), ArrowDown: () => this.jump(1) }[event.key];
    if (act && this.source) { event.preventDefault(); event.stopPropagation(); act(); }
  }

  close() { this.seen.disconnect(); this.source = null; this.stream.replaceChildren(); }
}
