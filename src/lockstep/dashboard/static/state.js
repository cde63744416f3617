/* The state that the gateway has sent, and its history of the last minutes. */
export const SPAN = 300;
export const state = { at: 0, fleet: null, workers: new Map(), operations: new Map(), health: null, run: null };
export const history = { workers: new Map(), rate: [], flight: [], requests: [], errors: [], latency: [], loop: [], memory: [] };

/* Apply an event; return the names of the parts that it changed. */
export function take(event) {
  const parts = new Set(Object.keys(event));
  state.at = event.at;
  for (const name of ["workers", "operations"]) if (event[name]) for (const [key, row] of Object.entries(event[name])) row === null ? state[name].delete(key) : state[name].set(key, row);
  for (const name of ["fleet", "health", "run"]) if (name in event) state[name] = event[name];
  remember();
  return parts;
}

function remember() {
  const { at, fleet, health } = state;
  if (fleet) { add(history.rate, fleet.rate); add(history.flight, fleet.in_flight); }
  if (health) { add(history.requests, health.rate); add(history.errors, health.errors); add(history.latency, health.p95 ?? 0); add(history.loop, health.loop_p99 ?? 0); add(history.memory, health.memory); }
  for (const [id, row] of state.workers) {
    let past = history.workers.get(id);
    if (!past) history.workers.set(id, past = { states: [], rate: [] });
    const last = past.states[past.states.length - 1];
    if (!last || last.state !== row.state || last.version !== row.version) past.states.push({ at: last ? at : Math.max(row.since, at - SPAN), state: row.state, version: row.version });
    while (past.states.length > 1 && (past.states[1].at < at - SPAN || past.states.length > 400)) past.states.shift();
    add(past.rate, row.rate);
  }
  for (const id of history.workers.keys()) if (!state.workers.has(id)) history.workers.delete(id);
  function add(list, value) {
    const last = list[list.length - 1];
    if (last && at - last[0] < .9) last[1] = value; else list.push([at, value]);
    while (list.length && list[0][0] < at - SPAN - 5) list.shift();
  }
}

export async function read(path) {
  const answer = await fetch(`/dashboard/data/${path}`);
  if (!answer.ok) throw new Error((await answer.json()).error?.message || `the gateway answered ${answer.status}`);
  return answer.json();
}
