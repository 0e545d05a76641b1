// The page of rtvirtiod: state, observation and events from one stream. Nothing is loaded from elsewhere, and every text from outside
// goes into the page as text, never as markup.
"use strict";

const MOST_EVENTS = 500;
const state = { status: null, seen: null, events: [], chosen: null, filter: "", kind: "", settings: null, lostAt: null, at: null };
// The service sends its state every 5 s, also where nothing changes.
const SILENT_MS = 15000;
const $ = (id) => document.getElementById(id);

function el(name, text, attributes) {
  const node = document.createElement(name);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  return node;
}

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Gives a node these children, and keeps those that it has: by `data-key`, or by place where there is none. So a click that has
// begun, selected text and the focus outlive what changes around them.
function fill(parent, wanted) {
  const focused = document.activeElement;
  const keyed = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  // First, so that those after them need not move, which would end a click and a selection.
  const stay = new Set(wanted.map((node) => node.dataset?.key));
  for (const [key, child] of keyed) if (key !== undefined && !stay.has(key)) child.remove();
  wanted.forEach((node, at) => {
    const there = parent.childNodes[at];
    const key = node.dataset?.key;
    const old = key === undefined ? there : keyed.get(key);
    if (!old || old.nodeName !== node.nodeName || old.dataset?.key !== key) { parent.insertBefore(node, there ?? null); return; }
    if (old !== there) parent.insertBefore(old, there ?? null);
    if (old.nodeType === Node.TEXT_NODE) { if (old.data !== node.data) old.data = node.data; return; }
    for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    fill(old, [...node.childNodes]);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

const words = (text) => String(text).replaceAll("_", " ");

function time(ns) {
  if (ns >= 1e9) return (ns / 1e9).toPrecision(3) + " s";
  if (ns >= 1e6) return (ns / 1e6).toPrecision(3) + " ms";
  return (ns / 1e3).toPrecision(3) + " µs";
}

const share = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const colour = (name) => ({ in_force: "good", observed: "good", met: "good", drift: "bad", failed: "bad", refused: "bad", missed: "bad",
  changed: "", fault: "bad", waiting: "warn", held: "warn", unknown: "warn", unproven: "warn", unplanned: "bad", aged: "bad", partial: "bad", applied_by_hand: "warn", would_apply: "warn" }[name] || "dim");

// The highest percentile that rests on enough requests, of the slowest disk: p99.99 needs a hundred thousand in the window.
function tail(disks, direction) {
  let worst = null;
  for (const disk of disks || []) for (const one of disk.directions) {
    if (one.direction !== direction) continue;
    for (const t of one.tails) if (!worst || t.percentile > worst.percentile || (t.percentile === worst.percentile && t.latency_ns > worst.latency_ns)) worst = t;
  }
  const cell = el("td", worst ? time(worst.latency_ns) : "–", { class: "n" });
  if (worst) cell.append(el("small", " p" + worst.percentile, { class: "dim" }));
  return cell;
}

function verdicts(seen) {
  const count = {};
  for (const target of seen?.targets || []) count[target.verdict] = (count[target.verdict] || 0) + 1;
  return ["missed", "unproven", "met"].filter((v) => count[v]).map((v) => [v, count[v]]);
}

// The first cause of a VM's missed target, where one is seen.
function cause(seen) {
  const missed = (seen?.targets || []).filter((t) => t.causes);
  const cell = el("td", null, { class: "why" });
  if (!missed.length) { cell.textContent = "–"; return cell; }
  const known = missed.find((t) => t.causes.length);
  cell.textContent = known ? words(known.causes[0].kind) : "not seen";
  cell.title = missed.map((t) => t.task + ": " + causesText(t)).join("\n");
  return cell;
}

function causesText(judged) {
  if (!judged.causes.length) return "cause not seen: " + (judged.causes_unread.length ? "not known are " + judged.causes_unread.join(", ") : "no counter shows one");
  return judged.causes.map((c) => c.evidence + (c.share === null ? "" : " (about " + share(c.share) + " of the late requests)") + ": " + c.remedy).join("; also ");
}

// The neighbour that a VM waited for longest, over all devices.
function waitsFor(vm) {
  let worst = null;
  for (const row of state.seen?.waits?.rows || []) {
    const one = row.vm === vm ? row.neighbours[0] : null;
    const waited = (row.waited_s ?? 0) * (one?.share ?? 0);
    if (one?.share > 0 && (!worst || waited > worst.waited)) worst = { vm: one.vm, share: one.share, kind: row.kind, waited };
  }
  const cell = el("td", worst ? worst.vm + " " + share(worst.share) : "–");
  if (worst && worst.kind !== "exact") cell.title = "estimate";
  return cell;
}

function shown() {
  const all = state.status ? state.status.vms : [];
  const filter = state.filter.toLowerCase();
  return all.filter((vm) => (vm.name + " " + words(vm.state)).toLowerCase().includes(filter));
}

function drawSummary() {
  const status = state.status;
  if (!status) return;
  const count = {};
  for (const vm of status.vms) count[vm.state] = (count[vm.state] || 0) + 1;
  const parts = Object.entries(count).map(([name, n]) => n + " " + words(name));
  let text = status.vms.length + " contracts: " + (parts.join(" · ") || "none") + " · mode " + status.mode;
  const host = state.seen?.host;
  for (const [resource, value] of Object.entries(host?.pressure || {})) text += " · " + resource + " pressure " + share(value);
  if (host && typeof host.stolen === "number") text += " · stolen " + share(host.stolen);
  if (host?.stalls) text += " · host stalled " + share(host.stalls.share);
  // Ages are those of when the state came, and of the time since then.
  const silent = state.at === null ? 0 : Date.now() - state.at;
  const looked = Math.max(0, ...status.vms.map((vm) => vm.looked_s ?? 0)) + silent / 1000;
  fill($("summary"), [document.createTextNode(text)]);
  // On a line of its own: what grows and shrinks must not move the rows under a pointer.
  fill($("age"), [document.createTextNode(status.vms.length ? "looked at " + looked.toFixed(0) + " s ago" : "")]);
  fill($("faults"), [...status.faults.map((f) => el("li", f.file + " is not used: " + f.why)), ...status.problems.map((p) => el("li", p)),
    ...(silent > SILENT_MS && state.lostAt === null ? [el("li", "nothing came from the service for " + (silent / 1000).toFixed(0) + " s: what is shown is old")] : [])]);
  $("none").hidden = status.vms.length > 0;
}

function drawTable() {
  const rows = shown().map((vm) => {
    const seen = state.seen?.vms[vm.name];
    const row = el("tr", null, { tabindex: "0", "aria-selected": String(vm.name === state.chosen), "data-vm": vm.name, "data-key": vm.name });
    row.append(el("td", vm.name));
    const standing = el("td", words(vm.state), { class: colour(vm.state) });
    const uncovered = (state.seen?.uncovered?.all || []).filter((one) => one.vm === vm.name);
    if (uncovered.length) {
      const isVoid = uncovered.some((one) => one.void?.length);
      standing.append(el("small", isVoid ? " settings that do not hold" : " not all of its I/O", { class: isVoid ? "bad" : "warn", title: uncovered.map((one) => one.text).join("\n") }));
    }
    row.append(standing);
    row.append(el("td", vm.criticality || "–"));
    const targets = el("td");
    const judged = verdicts(seen);
    if (!judged.length && vm.targets.length) {
      targets.textContent = seen?.disks_unseen ? "not observed: " + seen.disks_unseen.split(": ")[0] : seen ? "no verdict yet" : "not observed";
      targets.className = "why warn";
      if (seen?.disks_unseen) targets.title = seen.disks_unseen;
    } else if (!judged.length) targets.textContent = "none";
    for (const [name, n] of judged) targets.append(el("span", n + " " + name + " ", { class: colour(name) }));
    row.append(targets, cause(seen), waitsFor(vm.name));
    let rate = 0;
    for (const disk of seen?.disks || []) for (const one of disk.directions) if (one.direction !== "flush") rate += one.rate;
    row.append(tail(seen?.disks, "read"), tail(seen?.disks, "write"));
    row.append(el("td", seen?.disks.length ? rate.toFixed(0) + "/s" : "–", { class: "n" }));
    row.append(el("td", seen ? share(seen.cpu_used) : "–", { class: "n" }), el("td", share(seen?.cpu_delay), { class: "n" }));
    row.append(el("td", typeof seen?.throttled_per_s === "number" ? seen.throttled_per_s.toFixed(1) + "/s" : "–", { class: "n" }));
    return row;
  });
  fill($("vms").tBodies[0], rows);
}

// Requests by latency on logarithmic axes, with the targets as lines.
function histogram(disk, targets, predictions) {
  const { limits_ns: limits, reads, writes } = disk.histogram;
  const width = 720, height = 180, left = 44, bottom = 22, top = 14;
  const low = Math.log10(limits[0]), high = Math.log10(limits[limits.length - 1]);
  const x = (ns) => left + ((Math.log10(ns) - low) / (high - low)) * (width - left - 24);
  const most = Math.max(1, ...reads.map((n, i) => n + writes[i]));
  const y = (n) => (n <= 0 ? height - bottom : top + (1 - Math.log10(n + 1) / Math.log10(most + 1)) * (height - bottom - top));
  const title = "Latencies of " + (disk.file || disk.id);
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
  for (let e = Math.ceil(low); e <= high; e++) {
    out.append(svg("line", { class: "axis", x1: x(10 ** e), x2: x(10 ** e), y1: top, y2: height - bottom }));
    out.append(svg("text", { x: x(10 ** e), y: height - 6, "text-anchor": "middle" }, time(10 ** e)));
  }
  out.append(svg("text", { x: 2, y: top + 8 }, String(most)));
  for (let i = 0; i < reads.length; i++) {
    const from = i === 0 ? left : x(limits[i - 1]), to = i < limits.length ? x(limits[i]) : width - 20;
    const all = reads[i] + writes[i];
    if (!all) continue;
    const bar = (n, kind) => out.append(svg("rect", { class: kind, x: from, y: y(n), width: Math.max(1, to - from - 0.5), height: height - bottom - y(n) }));
    bar(all, "write");
    if (reads[i]) bar(reads[i], "read");
  }
  // Labels of targets that are close to each other stand on lines of their own.
  let labels = 0;
  for (const target of targets) {
    if (target.latency_ns < limits[0] || target.latency_ns > limits[limits.length - 1]) continue;
    const at = x(target.latency_ns), isRight = at > width * 0.75;
    out.append(svg("line", { class: "target", x1: at, x2: at, y1: top, y2: height - bottom }));
    out.append(svg("text", { x: at + (isRight ? -3 : 3), y: top + 8 + 12 * labels++, "text-anchor": isRight ? "end" : "start" }, target.task + " p" + target.percentile));
  }
  // What the plan promises: its bound, or what it expects where formulas give no bound.
  for (const one of predictions) {
    const ns = one.bound_ns ?? one.latency_ns;
    if (ns < limits[0] || ns > limits[limits.length - 1]) continue;
    const at = x(ns), isRight = at > width * 0.75;
    out.append(svg("line", { class: "predicted", x1: at, x2: at, y1: top, y2: height - bottom }));
    const label = one.task + " " + one.percentile + (one.bound_ns ? " bound" : " expected");
    out.append(svg("text", { x: at + (isRight ? -3 : 3), y: top + 8 + 12 * labels++, "text-anchor": isRight ? "end" : "start" }, label));
  }
  return out;
}

// What late requests waited for: an estimate, and what it does not cover.
function late(judged) {
  const of = (n) => share(n / judged.late.told);
  const disk = judged.late.disk === null ? "stalls of the disk are not known" : of(judged.late.disk) + " in stalls of the disk";
  const rest = judged.late_unseen ? " (" + judged.late_unseen + ")" : "";
  return `${judged.task} p${judged.percentile}: of ${judged.late.told} late requests about ${of(judged.late.host)} in stalls of the host, ${disk}, ${of(judged.late.other)} for something else${rest}.`;
}

// Whether limits were hit. Where nothing counts that, what was used of the limit.
function limiters(all) {
  const table = el("table");
  const head = el("tr");
  for (const name of ["limit", "hits", "used", "most"]) head.append(el("th", name, { scope: "col", class: name === "limit" ? "" : "n" }));
  table.append(head);
  for (const one of all) {
    const row = el("tr");
    row.append(el("td", words(one.kind) + ": " + one.name));
    const hits = el("td", one.hits_per_s === null ? "not counted" : one.hits_per_s.toFixed(1) + "/s", { class: one.hits_per_s > 0 ? "n warn" : "n" });
    if (one.unseen) hits.title = one.unseen;
    row.append(hits);
    row.append(el("td", one.used === null ? "–" : one.used.toPrecision(3), { class: one.limit && one.used >= 0.95 * one.limit ? "n warn" : "n" }), el("td", one.limit === null ? "–" : String(one.limit), { class: "n" }));
    table.append(row);
  }
  const scroll = el("div", null, { class: "scroll" });
  scroll.append(table);
  return scroll;
}

// The command that writes a setting, as a shell takes it.
function command(knob) {
  const quote = (text) => "'" + String(text).replaceAll("'", "'\\''") + "'";
  const thread = knob.path.match(/^\/proc\/\d+\/task\/(\d+)\/(sched|cgroup)$/);
  const fifo = knob.new.match(/^fifo (\d+)/);
  if (thread && thread[2] === "sched") return fifo ? `chrt --fifo --pid ${fifo[1]} ${thread[1]}` : null;
  if (thread) return `echo ${thread[1]} > /sys/fs/cgroup/cpu${knob.new}/tasks`;
  if (knob.new === "present") return `mkdir ${quote(knob.path)}`;
  return knob.path.startsWith("/") ? `echo ${quote(knob.new)} > ${quote(knob.path)}` : null;
}

function drawDetail() {
  const vm = state.status?.vms.find((one) => one.name === state.chosen);
  $("detail").hidden = !vm;
  if (!vm) return;
  const seen = state.seen?.vms[vm.name];
  const predictions = (state.status.plan?.predictions || []).filter((one) => one.vm === vm.name);
  fill($("detail-title"), [document.createTextNode(vm.name)]);
  const body = [];
  const line = (text, kind) => body.push(el("p", text, { class: kind || "" }));
  line(words(vm.state) + (vm.why ? ": " + vm.why : ""), colour(vm.state));
  if (vm.file) line("contract: " + vm.file + (vm.contract ? " (" + vm.contract + ")" : ""), "dim");
  if (vm.overrides) line(vm.overrides + " has a contract of it too, which does not count", "warn");
  if (vm.waits_for) body.push(el("pre", "sudo rtvirtio contract accept " + vm.name));
  if (vm.targets.length) {
    body.push(el("h3", "Targets"));
    const table = el("table");
    const head = el("tr");
    for (const name of ["task", "target", "predicted", "verdict", "why", "window"]) head.append(el("th", name, { scope: "col" }));
    table.append(head);
    for (const target of vm.targets) {
      const judged = seen?.targets.find((t) => t.task === target.task && t.percentile === target.percentile);
      const row = el("tr");
      row.append(el("td", target.task), el("td", "p" + target.percentile + " ≤ " + time(target.latency_ns)));
      const next = predictions.find((one) => one.task === target.task && one.percentile === "p" + target.percentile);
      row.append(el("td", next ? time(next.latency_ns) + (next.bound_ns ? ", below " + time(next.bound_ns) : "") : "–"));
      row.append(el("td", judged ? judged.verdict : "–", { class: colour(judged?.verdict) }), el("td", judged?.why || "", { class: "why" }));
      row.append(el("td", judged ? judged.seconds.toFixed(0) + " s" : ""));
      table.append(row);
      if (judged?.causes) line(judged.task + " p" + judged.percentile + ": " + causesText(judged) + ".", judged.causes.length ? "bad" : "warn");
      if (judged?.late?.told) line(late(judged), "why");
    }
    const scroll = el("div", null, { class: "scroll" });
    scroll.append(table);
    body.push(scroll);
  }
  for (const row of (state.seen?.waits.rows || []).filter((one) => one.vm === vm.name && one.neighbours.length)) {
    const all = row.neighbours.map((n) => n.vm + " " + share(n.share)).join(", ");
    line(`On ${row.device} it waits for ${all}${row.kind === "exact" ? "" : " (estimate)"}.`);
  }
  for (const part of (state.seen?.uncovered?.all || []).filter((one) => one.vm === vm.name)) {
    line("No setting acts: " + part.text + (part.void?.length ? ". Does not hold: " + part.void.join(", ") : ""), part.void?.length ? "bad" : "warn");
  }
  if (state.seen?.uncovered?.unseen) line("On which of its disks no setting acts is not known: " + state.seen.uncovered.unseen, "warn");
  if (seen?.disks_unseen) line("Disks are not seen: " + seen.disks_unseen, "why");
  for (const disk of seen?.disks || []) {
    body.push(el("h3", (disk.file || disk.id) + ", last " + disk.seconds.toFixed(0) + " s"));
    for (const one of disk.directions) {
      const tails = one.tails.map((t) => "p" + t.percentile + " " + time(t.latency_ns)).join(", ");
      line(`${one.direction}: ${one.rate.toFixed(1)}/s, n ${one.n}${tails ? ", " + tails : ""}${one.longest_ns ? ", longest below " + time(one.longest_ns) : ""}`);
    }
    if (disk.histogram) {
      const scroll = el("div", null, { class: "scroll" });
      scroll.append(histogram(disk, vm.targets, predictions));
      body.push(scroll);
    }
  }
  if (seen?.limiters.length) body.push(el("h3", "Limits"), limiters(seen.limiters));
  const delayed = (seen?.threads || []).filter((one) => one.cpu_delay !== null);
  if (delayed.length) line("Waited for a CPU: " + delayed.map((one) => one.role + " " + share(one.cpu_delay)).join(", "), "dim");
  body.push(el("h3", "Settings in force, and the command that sets each"));
  const settings = state.settings?.vm === vm.name ? state.settings : null;
  if (!settings) line("…", "dim");
  else if (settings.error) line(settings.error, "bad");
  else if (!settings.knobs.length) line("none", "dim");
  else {
    line(settings.reason + ", since " + settings.since, "dim");
    for (const knob of settings.knobs) {
      const now = knob.state === "in_force" ? "" : " — " + words(knob.state) + (knob.found ? " to " + knob.found : "");
      body.push(el("p", `${knob.knob}: ${knob.old ?? "(absent)"} → ${knob.new}${now}`, { class: { in_force: "", gone: "dim" }[knob.state] ?? colour("drift") }));
      // A thread that has ended took its settings along.
      const text = knob.state === "gone" ? null : command(knob);
      if (text) body.push(el("pre", text));
    }
  }
  fill($("detail-body"), body);
}

// The plan that is held, and one that waits with everything that it would change.
function drawPlan() {
  const plan = state.status?.plan;
  $("plan").hidden = !plan;
  if (!plan) return;
  const body = [];
  const line = (text, kind) => body.push(el("p", text, { class: kind || "" }));
  line(words(plan.state) + (plan.why ? ": " + plan.why : ""), colour(plan.state));
  if (plan.reason) line("for " + plan.vms.join(", ") + " since " + plan.since + ": " + plan.reason, "dim");
  if (plan.assumes) line("planned for: " + plan.assumes);
  for (const u of plan.unplanned || []) {
    line(`${u.device} is not planned: ${u.why}. Nothing is promised for its tasks of ${u.vms.join(", ")}${u.is_held ? "; what an earlier plan has set stays" : ""}`, "bad");
    if (u.remedy) body.push(el("pre", "sudo " + u.remedy));
  }
  for (const warning of plan.warnings || []) line("planning: " + warning, "warn");
  for (const task of plan.given_up || []) line(task + ": its target is predicted to be missed", "bad");
  for (const d of plan.drift || []) line(`${d.knob} was changed from ${d.wanted} to ${d.found}`, "bad");
  for (const knob of plan.yielded || []) line(knob + " is left to another program", "dim");
  const next = plan.proposal;
  if (next) {
    body.push(el("h3", "Another plan: " + next.reason));
    for (const c of next.changes) line(`${c.knob}: ${c.old ?? "(absent)"} → ${c.new}`);
    for (const e of next.effects) line(`${e.vm} (${e.criticality}): ${words(e.change)}`, { better: "good", worse: "bad", misses: "bad" }[e.change] || "dim");
    for (const task of next.given_up) line(task + ": its target is predicted to be missed", "bad");
    for (const reason of next.reasons) line(reason, "dim");
    if (plan.state === "waiting") body.push(el("pre", "sudo rtvirtio contract plan accept"));
  }
  fill($("plan-body"), body);
}

// A row for each VM that waits, a column for each VM that it waits for: shares of its waiting.
function drawWaits() {
  const waits = state.seen?.waits;
  const rows = (waits?.rows || []).filter((row) => row.neighbours.length || row.waited_s > 0);
  $("waits").hidden = !rows.length && !waits?.unseen.length;
  if ($("waits").hidden) return;
  const names = [...new Set(rows.flatMap((row) => row.neighbours.map((n) => n.vm)))].sort();
  const table = el("table");
  const head = el("tr");
  const column = (name, kind) => head.append(el("th", name, { scope: "col", class: kind || "" }));
  for (const name of ["VM", "device", "waited"]) column(name, name === "waited" ? "n" : "");
  for (const name of names) column(name, "n");
  for (const name of ["itself", "others", "cap"]) column(name, "n");
  column("how it is known");
  table.append(head);
  for (const row of rows) {
    const line = el("tr");
    const cell = (text, kind) => line.append(el("td", text, { class: kind || "" }));
    cell(row.vm);
    cell(row.device);
    cell(row.waited_s === null ? "–" : row.waited_s.toPrecision(3) + " s", "n");
    const longest = Math.max(0, ...row.neighbours.map((n) => n.share));
    for (const name of names) {
      const found = row.neighbours.find((n) => n.vm === name);
      cell(found ? share(found.share) : "", found && found.share === longest && row.waited_s > 0 ? "n warn" : "n");
    }
    cell(share(row.own), "n");
    cell(share(row.others), "n");
    cell(share(row.idle), "n");
    cell(row.kind === "exact" ? "counted" : row.waited_s === null ? "estimate, of the device's time" : "estimate", "dim");
    table.append(line);
  }
  const scroll = el("div", null, { class: "scroll" });
  scroll.append(table);
  fill($("waits-body"), [...(rows.length ? [scroll] : []), ...waits.unseen.map((why) => el("p", "not seen: " + why, { class: "why" }))]);
}

function drawEvents() {
  const kinds = [...new Set(state.events.map((e) => e.kind))].sort();
  const select = $("kind");
  if (select.options.length !== kinds.length + 1) {
    fill(select, [el("option", "all", { value: "" }), ...kinds.map((k) => el("option", words(k), { value: k }))]);
    select.value = state.kind;
  }
  const items = state.events.filter((e) => !state.kind || e.kind === state.kind).map((event) => {
    const item = el("li", null, { "data-key": event.id + " " + event.time });
    const at = new Date(event.time);
    item.append(el("time", isNaN(at) ? event.time : at.toLocaleTimeString(), { datetime: event.time, title: event.time }));
    item.append(el("span", words(event.kind), { class: colour(event.kind) }));
    item.append(el("span", (event.vm ? event.vm + ": " : "") + event.text));
    if (event.changes?.length) {
      const list = el("ul");
      for (const c of event.changes.slice(0, 30)) list.append(el("li", `${c.knob}: ${c.old ?? "(absent)"} → ${c.new}`));
      if (event.changes.length > 30) list.append(el("li", event.changes.length - 30 + " more"));
      item.append(list);
    }
    return item;
  });
  fill($("events"), items.reverse());
}

let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawSummary();
    drawTable();
    drawPlan();
    drawWaits();
    drawDetail();
    drawEvents();
  });
}

async function loadSettings() {
  const vm = state.chosen;
  if (!vm) return;
  try {
    state.settings = { vm, ...(await transport.json("v1/vms/" + encodeURIComponent(vm) + "/settings")) };
  } catch (error) {
    state.settings = { vm, error: String(error?.message || error) };
  }
  draw();
}

function choose(vm) {
  state.chosen = vm;
  draw();
  loadSettings();
  if (vm) requestAnimationFrame(() => $("detail-title").focus());
}

// Adds events that are not there yet. A service that was started again numbers from 1, and knows nothing of those before.
function remember(events) {
  const fresh = events.filter((event) => !state.events.some((e) => e.id === event.id && e.time === event.time));
  state.events = [...state.events, ...fresh].sort((a, b) => Date.parse(a.time) - Date.parse(b.time)).slice(-MOST_EVENTS);
  return fresh.length;
}

// Cockpit serves none of the service's files: what a link names comes as a file of its own.
async function saveLinked(event) {
  event.preventDefault();
  const path = event.currentTarget.getAttribute("href");
  const kind = path.endsWith(".html") ? "text/html" : "text/plain";
  const file = document.createElement("a");
  file.href = URL.createObjectURL(new Blob([await transport.text(path)], { type: kind }));
  file.download = "rtvirtio-" + path;
  file.click();
  URL.revokeObjectURL(file.href);
}

function connect() {
  if (transport === transports.http && location.protocol === "file:") {
    $("link").textContent = "this file has no data: open the page at the service, or save a copy there (curl --unix-socket /run/rtvirtio/rtvirtiod.sock http://localhost/copy.html)";
    return;
  }
  if (transport === transports.cockpit) {
    for (const link of document.querySelectorAll("footer a")) link.addEventListener("click", saveLinked);
  }
  transport.stream({
    opened() {
      state.lostAt = null;
      $("link").textContent = "live";
      $("link").className = "good";
      transport.json("v1/history").then((events) => { remember(events); draw(); }).catch(() => {});
    },
    lost() {
      state.lostAt ??= new Date();
      $("link").textContent = "not connected since " + state.lostAt.toLocaleTimeString() + ": trying again, what is shown is old";
      $("link").className = "bad";
    },
    saved(time) {
      // A copy is as old as it is.
      state.at = null;
      $("link").textContent = "a copy of " + new Date(time).toLocaleString() + ": nothing in it changes";
      $("link").className = "warn";
      for (const link of document.querySelectorAll("footer a")) link.removeAttribute("href");
      transport.json("v1/history").then((events) => { remember(events); draw(); });
    },
    status(data) { state.status = JSON.parse(data); state.at = Date.now(); draw(); },
    observation(data) { state.seen = JSON.parse(data); draw(); },
    event(data) {
      const event = JSON.parse(data);
      if (!remember([event])) return;
      if (event.vm && event.vm === state.chosen) loadSettings();
      draw();
    },
  });
}

// What is old is said to be, also where nothing comes any more.
if (transport !== transports.copy) setInterval(draw, 2000);
$("filter").addEventListener("input", (event) => { state.filter = event.target.value; draw(); });
$("kind").addEventListener("change", (event) => { state.kind = event.target.value; draw(); });
$("close").addEventListener("click", () => choose(null));
$("vms").addEventListener("click", (event) => { const row = event.target.closest("tr[data-vm]"); if (row) choose(row.dataset.vm); });
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  const row = document.activeElement?.closest?.("tr[data-vm]");
  const rows = [...document.querySelectorAll("#vms tr[data-vm]")];
  if (event.key === "Escape") { if (typing) event.target.blur(); else choose(null); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  if (event.key === "j" || event.key === "k") rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(row) + (event.key === "j" ? 1 : -1)))]?.focus();
  if (event.key === "Enter" && row) choose(row.dataset.vm);
});
connect();
