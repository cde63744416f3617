/* The frame of the dashboard: login, the event stream, the four views, keys. */
import { make, systemTheme, theme } from "./dom.js";
import { FleetView } from "./fleet.js";
import { HealthView } from "./health.js";
import { SessionsView } from "./sessions.js";
import { state, take } from "./state.js";
import { TrainingView } from "./training.js";

const $ = id => document.getElementById(id);
const VIEWS = { fleet: FleetView, sessions: SessionsView, training: TrainingView, health: HealthView };
let view = null, viewName = "", stream = null, loggedIn = false;

theme(localStorage.getItem("lockstep-theme") || systemTheme(), $("theme"));
$("theme").onclick = () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("lockstep-theme", next); theme(next, $("theme")); };
$("help").onclick = () => $("keys").showModal();
$("logout").onclick = async () => { await fetch("/dashboard/logout", { method: "POST" }); leave("You are logged out."); };

async function send(body) {
  const answer = await fetch("/dashboard/login", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  return answer.ok ? null : (await answer.json()).error?.message || `the gateway answered ${answer.status}`;
}

function leave(message = "") {
  loggedIn = false; stream?.close(); stream = null; view?.close?.(); view = null; viewName = "";
  $("logout").hidden = true; live("", "");
  const input = make("input", { type: "password", name: "token", placeholder: "admin token", autocomplete: "current-password", "aria-label": "Admin token", required: true });
  const wrong = make("p", { class: "wrong", role: "alert" }, message);
  const form = make("form", {}, input, make("button", {}, "Log in"));
  form.onsubmit = async event => { event.preventDefault(); const why = await send({ token: input.value }); if (why) { wrong.textContent = why; input.select(); } else enter(); };
  $("view").replaceChildren(make("section", { class: "card login" }, make("h1", {}, "Log in"),
    make("p", {}, "Enter the admin token of this gateway. On its machine, ", make("code", {}, "lockstep dashboard"), " opens this page and logs in."), form, wrong));
  input.focus();
}

function enter() {
  loggedIn = true; $("logout").hidden = false;
  connect();
  if (!/^#\/(fleet|sessions|training|health)/.test(location.hash)) location.replace("#/fleet");
  route();
}

function live(kind, text) { $("live").className = `live ${kind}`; $("live").textContent = text; $("live").hidden = !text; }

function connect() {
  stream = new EventSource("/dashboard/events");
  stream.onopen = () => live("on", "live");
  stream.onmessage = event => { const parts = take(JSON.parse(event.data)); view?.update?.(parts); };
  stream.addEventListener("logout", () => leave("Your login has ended."));
  stream.onerror = async () => {
    if (!loggedIn) return;
    live("off", "reconnecting");
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(async () => {
      const answer = await fetch("/dashboard/login").catch(() => null);
      if (!loggedIn) return;
      if (answer?.ok && !(await answer.json()).logged_in) leave("The gateway was restarted: log in again.");
      else connect();
    }, 1500);
  };
}

function route() {
  if (location.hash.startsWith("#code=")) { start(); return; }
  if (!loggedIn) return;
  const [name, ...rest] = location.hash.slice(2).split("/").map(decodeURIComponent);
  const Kind = VIEWS[name] || FleetView;
  if (viewName !== name || !view) {
    view?.close?.();
    viewName = name; view = new Kind($("view"));
    $("view").replaceChildren(view.root);
    scrollTo(0, 0);
  }
  for (const link of document.querySelectorAll("header nav a")) link.getAttribute("href") === `#/${name}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · Lockstep`;
  view.go?.(rest);
  if (state.at) view.update?.(new Set(["fleet", "workers", "operations", "health", "run"]));
}
addEventListener("hashchange", route);

addEventListener("keydown", event => {
  if (!loggedIn || event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing) { view?.key?.(event, true); return; }
  const names = Object.keys(VIEWS);
  if (names[event.key - 1]) location.hash = `#/${names[event.key - 1]}`;
  else if (event.key === "?") $("keys").showModal();
  else if (event.key === "/") { event.preventDefault(); if (viewName !== "sessions") { location.hash = "#/sessions"; setTimeout(() => view?.search?.focus(), 60); } else view.focusSearch(); }
  else view?.key?.(event, false);
});

// Relative times change although nothing happens. A hidden page is not updated.
setInterval(() => { if (!document.hidden && loggedIn) view?.tick?.(); }, 1000);

async function start() {
  // The address of a login may name the view that it opens: #code=CODE/sessions/NAME
  const [code, ...page] = location.hash.startsWith("#code=") ? location.hash.slice(6).split("/") : [];
  if (code) {
    history.replaceState(null, "", `#/${page.join("/") || "fleet"}`);
    const why = await send({ code });
    if (why) { leave(why); return; }
  } else if (!(await (await fetch("/dashboard/login")).json()).logged_in) { leave(); return; }
  enter();
}
start();
