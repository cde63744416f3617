/* Making nodes and writing numbers. Text always enters a page as text: no string is parsed as HTML. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") node.style.cssText = value; // a style attribute would need an unsafe policy
    else if (key.startsWith("on")) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

export const digits = value => typeof value === "number" && value && Math.abs(value) < 1e-3 ? value.toExponential() : String(value);
export const finite = values => values.filter(value => typeof value === "number");
export function show(value, unit = "") {
  if (typeof value !== "number") return value === undefined || value === null ? "–" : String(value);
  if (value === 0) return "0" + unit;
  const size = Math.abs(value);
  const text = size < 1e-3 ? value.toExponential(2) : size < 10 ? value.toFixed(3)
    : size < 1000 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
  return text + unit;
}
export const short = value => Math.abs(value) >= 1e6 ? +(value / 1e6).toPrecision(3) + "M" : Math.abs(value) >= 1000 ? +(value / 1000).toPrecision(3) + "k" : String(+value.toPrecision(4));
export const count = value => typeof value === "number" ? Math.round(value).toLocaleString("en") : "–";
export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}
export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value < 0.0995) return `${+(value * 1000).toPrecision(2)} ms`;
  if (value < 100) return `${+value.toPrecision(2)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}
export const ago = at => { const past = Date.now() / 1000 - at; return past < 1.5 ? "now" : `${seconds(Math.max(1, past))} ago`; };
export const clock = at => new Date(at * 1000).toLocaleTimeString("en-GB");

export function theme(name, button) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === "dark" ? "Light" : "Dark";
}
export const systemTheme = () => matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
export const listed = pairs => make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
export const swatch = (name, color) => make("span", {}, make("i", { style: `background:var(--${color})` }), name);
