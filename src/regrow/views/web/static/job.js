// The page of one job.

import { accountPanel } from "./account.js";
import { follow } from "./api.js";
import { duration, fill, h, number, stateOf, stepOf } from "./dom.js";
import { logPanel } from "./logs.js";
import { rankMap } from "./ranks.js";
import { timeline } from "./timeline.js";

// Without a pace, a last step that is older than this is shown. A late job has the pace 0.
const SILENT_S = 5;

/** Show a job in `main`; returns a function that ends it. */
export function jobPage(main, key, onLink, onName) {
  const head = h("section", { id: "overview" });
  const nodes = h("div", { class: "scroll" });
  const story = h("pre", { tabindex: 0 });
  const lane = timeline();
  const account = accountPanel(key);
  const logs = logPanel(key);
  const ranks = rankMap((rank) => logs.choose(rank));
  main.replaceChildren(head, ranks.section, lane.section,
    account.failures,
    logs.section,
    account.ledger,
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
    account.update(job);
    logs.update(job);
    fill(nodes, job.nodes, nodeTable);
    if (story.textContent !== job.story) story.textContent = job.story;
  }
  return () => {
    stop();
    account.close();
    logs.close();
  };
}

function overview(job) {
  const isSilent = !job.pace && job.step_age_s > SILENT_S;
  const spent = job.max_restarts - job.restarts_left;
  const charged = job.max_restarts === null || spent === job.restart_count ? "" : `${spent} charged, `;
  const facts = [
    ["state", stateOf(job.state)],
    ["step", stepOf(job)],
    ["steps/s (slowest rank)", number(job.pace)],
    isSilent ? ["last step", h("span", { class: "state warn" }, `${duration(job.step_age_s)} ago`)] : null,
    [job.is_over ? "ran for" : "running for", duration(job.duration_s)],
    ["attempt", number(job.attempt)],
    ["workers", `${number(job.world_size)}${job.nodes.length > 1 ? `, ${job.nodes.filter((node) => node.attempt === job.attempt).length} of ${job.nodes.length} nodes` : ""}`],
    ["restarts", `${number(job.restart_count)}${job.restarts_left === null ? "" : ` (${charged}${job.restarts_left} left)`}`],
    ["steps done again", number(job.lost_steps)],
  ].filter(Boolean);
  const reason = job.reason === job.state ? "" : job.reason;
  const latest = job.nodes.filter((node) => node.incident).sort((a, b) => b.incident_at - a.incident_at)[0];
  const [label, incident] = job.is_over ? ["end: ", reason] : [`latest, ${latest?.incident_text}: `, latest?.incident];
  return [
    h("h1", {}, job.script ?? "job", " ", h("span", { class: "dim" }, job.run_id ?? "")),
    h("p", { class: "dim" }, `${job.command} · started ${job.started_text}`),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    job.fault ? h("p", { class: "bad", role: "alert" }, `The other hosts are not reached now: ${job.fault}`) : null,
    incident ? h("p", {}, h("span", { class: "dim" }, label), incident) : null,
  ].filter(Boolean);
}

function nodeTable(nodes) {
  const names = ["host", "state", "node rank", "attempt", "round", "answered", "last event", "incident"];
  return h("table", {},
    h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
    h("tbody", {}, nodes.map((node) => h("tr", {},
      h("td", {}, node.host), h("td", {}, stateOf(node.state)), h("td", {}, number(node.node_rank)), h("td", {}, number(node.attempt)),
      h("td", {}, number(node.round)), h("td", {}, node.answered_s === null ? "-" : node.answered_s ? `${node.answered_s} s ago` : "now"), h("td", {}, node.last_text), h("td", { class: "long" }, node.incident)))));
}
