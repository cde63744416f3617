/* Sessions: the table, the tree of a session, and its tokens. */
import { ago, count, make, show } from "./dom.js";
import { read, state } from "./state.js";
import { spread, TokenView } from "./tokens.js";

const KINDS = { main: "green", subagent: "blue", fork: "violet", compaction: "amber", retry: "red", auxiliary: "", unknown: "" };
const ROWS = 50;
const address = (id, ...rest) => `#/sessions/${[id, ...rest].map(encodeURIComponent).join("/")}`;

export class SessionsView {
  constructor() {
    this.root = make("div"); this.table = new SessionTable(); this.page = null; this.turns = null;
  }

  go([id, ...rest]) {
    if (!id) { this.page?.close(); this.page = null; this.root.replaceChildren(this.table.root); this.table.load(); return; }
    if (this.page?.id !== id) { this.page?.close(); this.page = new SessionPage(id); this.root.replaceChildren(this.page.root); }
    this.page.go(rest);
  }

  update() { // reload when the store's count of turns has changed
    const store = state.health?.store, turns = store ? `${store.turns} ${store.live} ${store.opened} ${store.deleted}` : null;
    if (turns === this.turns) return;
    const first = this.turns === null;
    this.turns = turns;
    if (!first) (this.page ?? this.table).refresh();
  }
  tick() { if (!this.page) this.table.tick(); }

  get search() { return this.page ? null : this.table.search; }
  focusSearch() { if (!this.page) { this.search.focus(); return; } location.hash = "#/sessions"; setTimeout(() => this.search?.focus(), 60); }
  key(event, typing) {
    if (event.key === "Escape" && this.page) location.hash = "#/sessions";
    else if (!this.page) this.table.key(event, typing);
  }
  close() { this.page?.close(); }
}

class SessionTable {
  constructor() {
    this.limit = ROWS; this.rows = []; this.at = -1;
    this.search = make("input", { class: "search", type: "search", placeholder: "Search by session or harness   /", "aria-label": "Search sessions" });
    this.search.oninput = () => { clearTimeout(this.timer); this.timer = setTimeout(() => { this.limit = ROWS; this.load(); }, 120); };
    this.body = make("tbody"); this.total = make("span", { class: "muted small" });
    this.table = make("table", { class: "rows" }, make("thead", {}, make("tr", {}, ...[["Session"], ["Harness", "wide"], ["Turns", "num"], ["Branches", "wide"], ["Prefix breaks"], ["Sampled", "num wide"], ["Reward", "num wide"], ["Active", "num"]].map(([name, kind]) => make("th", { class: kind, scope: "col" }, name)))), this.body);
    this.more = make("button", { class: "more", type: "button", hidden: true, onclick: () => { this.limit += 100; this.load(); } }, "Show more");
    this.root = make("div", {}, make("h1", {}, "Sessions ", this.total), this.search, make("div", { class: "card x", style: "margin-top:12px" }, this.table), this.more);
  }

  async load() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    try {
      const data = await read(`sessions?limit=${Math.min(200, this.limit)}&search=${encodeURIComponent(this.search.value)}`);
      const chosen = this.rows[this.at]?.info.id;
      this.rows = data.rows; this.at = this.rows.findIndex(row => row.info.id === chosen);
      this.total.textContent = ` ${count(data.total)}`;
      this.more.hidden = data.total <= data.rows.length || this.limit >= 200;
      this.draw();
    } catch (error) { this.body.replaceChildren(make("tr", {}, make("td", { colspan: 8, class: "empty" }, error.message))); }
    this.loading = false;
    if (this.again) { this.again = false; setTimeout(() => this.load(), 400); }
  }
  refresh() { this.load(); }
  tick() { for (const node of this.body.querySelectorAll("[data-used]")) node.textContent = ago(+node.dataset.used); }

  draw() {
    if (!this.rows.length) { this.body.replaceChildren(make("tr", {}, make("td", { colspan: 8, class: "empty" }, this.search.value ? "No session with that name or harness." : "No sessions yet. A request names its session by the header X-Session-ID, or by the base URL /sessions/ID/v1."))); return; }
    this.body.replaceChildren(...this.rows.map((row, i) => make("tr", { class: "open", "data-session": row.info.id, "aria-selected": String(i === this.at), onclick: () => { location.hash = address(row.info.id); } },
      make("td", { class: "what" }, make("b", { title: row.info.id }, row.info.id), make("span", {}, row.prompt)),
      make("td", { class: "wide" }, row.harness || make("span", { class: "muted" }, "–")),
      make("td", { class: "num" }, count(row.info.turns)),
      make("td", { class: "wide" }, make("span", { class: "chips" }, ...chips(row.kinds, KINDS))),
      make("td", {}, Object.keys(row.breaks).length ? make("span", { class: "chips" }, ...chips(row.breaks, {}, "red")) : make("span", { class: "muted" }, "none")),
      make("td", { class: "num wide" }, count(row.sampled)),
      make("td", { class: "num wide" }, row.info.reward === null ? make("span", { class: "muted" }, row.info.finished ? "finished" : "–") : show(row.info.reward)),
      make("td", { class: "num", "data-used": row.info.used }, ago(row.info.used)))));
  }

  key(event, typing) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) {
      event.preventDefault(); this.at = Math.min(this.rows.length - 1, Math.max(0, this.at + by)); this.draw();
      this.body.children[this.at]?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" && (this.at >= 0 || typing) && this.rows.length) location.hash = address(this.rows[Math.max(0, this.at)].info.id);
  }
}

const chips = (counts, tones, tone = "") => Object.entries(counts).map(([name, times]) => make("span", { class: `chip ${tones[name] ?? tone}` }, times > 1 ? `${times} ${name}` : name));

class SessionPage {
  constructor(id) {
    this.id = id; this.branch = null; this.tree = null;
    this.facts = make("ul", { class: "facts" }); this.treeBox = make("section", { class: "card tree", "aria-label": "Branches" }); this.breakBox = make("div");
    this.tokens = new TokenView((at, token, moved) => {
      history.replaceState(null, "", address(this.id, "branch", this.branch, "token", at));
      for (const node of this.treeBox.querySelectorAll(".turns .on")) node.classList.remove("on");
      this.treeBox.querySelector(`[data-turn="${token.turn}"]`)?.classList.add("on");
    });
    this.name = make("span", { class: "muted small" });
    this.reader = make("section", { class: "card reader", hidden: true }, make("div", { class: "controls" }, this.name, this.tokens.controls), make("div", { class: "pane" }, this.tokens.stream, this.tokens.detail));
    this.root = make("div", {}, make("a", { class: "crumb", href: "#/sessions" }, "‹ Sessions"), make("h1", {}, id), this.facts, this.treeBox, this.breakBox, this.reader);
  }

  async go(rest) {
    this.wanted = rest;
    try {
      if (!this.tree) await this.load();
      const [kind, number, what, at] = rest;
      if (kind === "turn") { const turn = this.tree.turns.find(each => each.index === +number); if (turn) await this.open(turn.branch, turn.end - turn.sampled); }
      else if (kind === "branch") await this.open(+number, what === "token" ? +at : null);
      else if (this.branch === null && this.tree.branches.length) await this.open(this.tree.branches[0].number, null);
    } catch (error) { this.treeBox.replaceChildren(make("div", { class: "empty" }, error.message)); }
  }

  async load() {
    this.tree = await read(`sessions/${encodeURIComponent(this.id)}`);
    const { row, branches, turns } = this.tree;
    this.facts.replaceChildren(...[row.harness || "unknown harness", `${count(turns.length)} turns`, `${branches.length} branch${branches.length === 1 ? "" : "es"}`, `${count(row.sampled)} sampled tokens`,
      ...(row.info.reward === null ? [] : [`reward ${show(row.info.reward)}`]), `active ${ago(row.info.used)}`].map(text => make("li", {}, text)));
    const byBranch = new Map(branches.map(branch => [branch.number, []]));
    for (const turn of turns) byBranch.get(turn.branch)?.push(turn);
    this.treeBox.replaceChildren(...this.ordered(branches).map(branch => {
      const tone = KINDS[branch.kind] || "";
      const squares = byBranch.get(branch.number).map(turn => make("button", { type: "button", "data-turn": turn.index, class: `${tone} ${turn.broke ? "broke" : ""} ${turn.finish === "abort" ? "abort" : ""}`, "aria-label": `Turn ${turn.index}`,
        title: `turn ${turn.index}: ${turn.sampled} tokens, ${turn.finish}${turn.worker ? `, ${turn.worker}` : ""}${turn.versions.length ? `, ${turn.versions.join(" → ")}` : ""}\n${turn.text}`,
        onclick: event => { event.stopPropagation(); location.hash = address(this.id, "turn", turn.index); this.open(branch.number, turn.end - turn.sampled); } }));
      return make("div", { class: "branch", "data-branch": branch.number, "aria-current": String(branch.number === this.branch), onclick: () => { location.hash = address(this.id, "branch", branch.number); this.open(branch.number, null); } },
        make("span", { class: "title", style: `padding-left:${branch.depth * 18}px` }, branch.depth ? make("span", { class: "elbow" }, "└") : null, make("span", { class: `chip ${tone}` }, branch.kind), make("small", { title: branch.evidence }, branch.evidence)),
        make("span", { class: "turns" }, ...squares), make("span", { class: "muted small num" }, `${count(branch.tokens)} tokens`));
    }));
    const broken = turns.filter(turn => turn.broke);
    if (broken.length === this.broken) return; // keep an open break open
    this.broken = broken.length;
    this.breakBox.replaceChildren(...(broken.length ? [make("h2", {}, "Prefix breaks"), make("div", { class: "chips" }, ...broken.map(turn => make("button", { type: "button", "data-break": turn.index, onclick: () => this.showBreak(turn.index) }, `turn ${turn.index}: ${turn.breaks[turn.breaks.length - 1]}`))), this.sides = make("div")] : []));
  }

  ordered(branches) { // every branch below its parent
    const below = new Map();
    const known = new Set(branches.map(branch => branch.number));
    for (const branch of branches) { const above = known.has(branch.parent) && branch.parent !== branch.number ? branch.parent : null; below.set(above, [...(below.get(above) || []), branch]); }
    const walk = number => (below.get(number) || []).flatMap(branch => [branch, ...walk(branch.number)]);
    return walk(null);
  }

  async refresh() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    try {
      const before = this.tree;
      await this.load();
      const branch = this.tree.branches.find(each => each.number === this.branch), old = before?.branches.find(each => each.number === this.branch);
      if (!before || this.branch === null) await this.go(this.wanted ?? []);
      else if (branch && old && branch.tokens > old.tokens) this.tokens.extend(await this.source(this.branch));
      this.mark();
    } catch { /* the session may have been deleted: keep what was read */ }
    this.loading = false;
    if (this.again) { this.again = false; setTimeout(() => this.refresh(), 500); }
  }

  mark() {
    for (const row of this.treeBox.querySelectorAll(".branch")) row.setAttribute("aria-current", String(+row.dataset.branch === this.branch));
    const branch = this.tree.branches.find(each => each.number === this.branch);
    if (branch) this.name.textContent = `${branch.kind}, ${count(branch.tokens)} tokens`;
  }

  async source(number) {
    const path = `sessions/${encodeURIComponent(this.id)}/branches/${number}`;
    const { total, segments } = await read(path), info = this.tree.row.info;
    const workers = new Map(this.tree.turns.map(turn => [turn.index, turn.worker]));
    return {
      total, segments: segments.map(each => [each.author, each.start, each.end, each.author]),
      read: async (start, end) => {
        const page = await read(`${path}/tokens?start=${start}&end=${end}`);
        const [roles, sampled, mask, versions, turns] = [page.authors, page.sampled, page.mask, page.versions, page.turns].map(spread);
        return page.ids.map((id, i) => ({ id, text: page.texts[i], role: roles[i], own: sampled[i], mask: mask[i], version: versions[i], turn: turns[i], logprob: page.logprobs[i], support: page.supports[i] }));
      },
      facts: token => [["worker", workers.get(token.turn) ?? "–"], ["reward", show(info.reward)]],
    };
  }

  async open(number, at) {
    if (this.branch === number && at !== null && this.tokens.source) { if (this.tokens.chosen !== at) await this.tokens.choose(at, true); return; }
    if (this.branch === number && this.tokens.source) return;
    this.branch = number; this.mark(); this.reader.hidden = false;
    await this.tokens.open(await this.source(number), at);
  }

  async showBreak(turn) {
    const found = await read(`sessions/${encodeURIComponent(this.id)}/breaks/${turn}`);
    const side = (title, text, kind) => make("div", {}, make("h4", {}, title), make("pre", {}, make("span", { class: "was" }, found.before), make("mark", { class: kind }, text || "(nothing)")));
    this.sides.replaceChildren(make("section", { class: "card break" }, make("b", {}, `Turn ${found.turn}: ${found.cause}`),
      make("span", { class: "muted small" }, ` · the first ${count(found.shared)} tokens are equal; then they differ`),
      make("div", { class: "sides" }, side(found.other === null ? "No stored turn" : `Stored, up to turn ${found.other}`, found.stored, ""), side("Sent by the client", found.sent, "new"))));
  }
  close() { this.tokens.close(); }
}
