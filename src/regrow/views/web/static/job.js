// The page of one job.

import { follow } from "./api.js";
import { day, duration, fill, h, number, s, stateOf, time } from "./dom.js";
import { logPanel } from "./logs.js";
import { rankMap } from "./ranks.js";
import { timeline } from "./timeline.js";

const RUNGS = { 1: "same process", 2: "one new process", 3: "new worker group", 4: "other hosts" };

/** Show a job in `main`; returns a function that ends it. */
export function jobPage(main, key, onLink, onName) {
  const head = h("section", { id: "overview" });
  const nodes = h("div", { class: "scroll" });
  const restarts = h("div");
  const story = h("pre", { tabindex: 0 });
  const lane = timeline();
  const logs = logPanel(key);
  const ranks = rankMap((rank) => logs.choose(rank));
  main.replaceChildren(head, ranks.section, lane.section,
    h("section", { id: "failures" }, h("h2", {}, "Failures and restarts"), restarts),
    logs.section,
    h("section", { id: "nodes" }, h("h2", {}, "Nodes"), nodes),
    h("section", { id: "story" }, h("h2", {}, "Story"), story));
  const stop = follow(`jobs/${key}/live`, show, onLink);

  function show(data) {
    const { columns, rows } = data.ranks;
    const job = { ...data, ranks: rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]]))) };
    onName(job.script ?? job.run_id ?? "job");
    head.replaceChildren(...overview(job));
    ranks.update(job);
    lane.update(job);
    fill(restarts, job.restarts, failures);
    logs.update(job);
    fill(nodes, job.nodes, nodeTable);
    if (story.textContent !== job.story) story.textContent = job.story;
  }
  return () => {
    stop();
    logs.close();
  };
}

function overview(job) {
  const facts = [
    ["state", stateOf(job.state)],
    ["step", number(job.step)],
    ["steps/s (slowest rank)", number(job.pace)],
    ["running for", duration(job.duration_s)],
    ["attempt", number(job.attempt)],
    ["workers", `${number(job.world_size)}${job.nodes.length > 1 ? `, ${job.nodes.filter((node) => node.attempt === job.attempt).length} of ${job.nodes.length} nodes` : ""}`],
    ["restarts", `${number(job.restart_count)}${job.restarts_left === null ? "" : ` (${job.restarts_left} left)`}`],
    ["steps done again", number(job.lost_steps)],
  ];
  const incident = job.is_over ? job.reason : job.nodes.map((node) => node.incident).find(Boolean);
  return [
    h("h1", {}, job.script ?? "job", " ", h("span", { class: "dim" }, `${job.run_id}`)),
    h("p", { class: "dim" }, `${job.command} · started ${day(job.started)}`),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    incident ? h("p", {}, h("span", { class: "dim" }, job.is_over ? "end: " : "latest: "), incident) : null,
  ].filter(Boolean);
}

function failures(restarts) {
  if (!restarts.length) return h("p", { class: "dim" }, "None.");
  return restarts.map((each, index) => {
    const who = each.rank === null ? "" : `rank ${each.rank}${each.host ? ` on ${each.host}` : ""}: `;
    const healed = each.restarted ? `rung ${each.rung}, ${RUNGS[each.rung]}` : "not healed";
    const last = each.phases.at(-1);
    const most = last?.[1] || 1;
    return h("details", { open: index === restarts.length - 1 },
      h("summary", {}, h("span", { class: "dim" }, `${time(each.time)} `), who, each.what, h("span", { class: "dim" }, ` (${healed}${last ? `, ${duration(last[1])}` : ""})`)),
      h("p", { class: "dim" }, `attempt ${each.attempt}, cause: ${each.cause}${each.pid ? `, pid ${each.pid}` : ""}${each.lost_steps ? `, ${number(each.lost_steps)} steps done again` : ""}`),
      each.phases.length ? h("div", { class: "bars" }, each.phases.flatMap(([name, after]) => [
        h("span", {}, name),
        s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { width: (100 * after) / most, height: 10 })),
        h("span", {}, `after ${duration(after)}`)])) : null,
      each.details.map((text) => h("p", {}, text)),
      each.traceback ? h("pre", { tabindex: 0 }, each.traceback) : null);
  });
}

function nodeTable(nodes) {
  const names = ["host", "state", "node rank", "attempt", "round", "last event", "incident"];
  return h("table", {},
    h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
    h("tbody", {}, nodes.map((node) => h("tr", {},
      h("td", {}, node.host), h("td", {}, stateOf(node.state)), h("td", {}, number(node.node_rank)), h("td", {}, number(node.attempt)),
      h("td", {}, number(node.round)), h("td", {}, time(node.last)), h("td", { class: "long" }, node.incident)))));
}
