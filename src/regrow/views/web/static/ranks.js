// The ranks as a heat map: one button each, moved through with the arrow keys.

import { duration, fill, h, number, stepOf } from "./dom.js";

const OFF = ["stopped", "succeeded", "unknown"];
const KEYS = [
  ["b0", "at the first rank's step, or one behind"], ["b1", "up to 3 behind"], ["b2", "up to 10"], ["b3", "up to 30"],
  ["b4", "more"], ["stale", "no recent step"], ["none", "no step reported"], ["sick", "failed, hung, lost or suspended"], ["off", "does not run"],
];

const MOST_NAMED = 5;

function shade(rank) {
  if (OFF.includes(rank.state)) return "off";
  if (rank.state !== "running") return "sick";
  if (rank.step === null) return "none";
  if (rank.pace === 0) return "stale";
  const limits = [1, 3, 10, 30];
  const at = limits.findIndex((limit) => rank.behind <= limit);
  return `b${at < 0 ? 4 : at}`;
}

export function describe(rank, nodes) {
  const parts = [`rank ${rank.rank} on ${nodes[rank.node]?.host}`, rank.state];
  if (rank.what) parts.push(rank.what);
  if (rank.step !== null) parts.push(`step ${stepOf(rank)}`);
  if (rank.behind) parts.push(`${number(rank.behind)} behind`);
  if (rank.phase) parts.push(`in the phase ${rank.phase}`);
  if (shade(rank) === "stale") parts.push("no recent step");
  else if (rank.pace !== null) parts.push(`${number(rank.pace)} steps/s`);
  if (rank.step_age_s !== null) parts.push(`last step ${duration(rank.step_age_s)} ago`);
  if (rank.heartbeat_age_s !== null) parts.push(`last exchange of heartbeats ${duration(rank.heartbeat_age_s)} ago`);
  if (rank.replaced) parts.push(`replaced ${rank.replaced} times`);
  if (rank.pid !== null) parts.push(`pid ${rank.pid}`);
  return parts.join(", ");
}

/** The ranks that a reader should look at. */
function attention(ranks) {
  const slow = ranks.filter((each) => each.behind > 1 && each.state === "running").sort((a, b) => b.behind - a.behind);
  const stale = ranks.filter((each) => shade(each) === "stale").sort((a, b) => b.step_age_s - a.step_age_s);
  const list = (name, found, figure) => `${name}: ${found.slice(0, MOST_NAMED).map((each) => `rank ${each.rank} (${figure(each)})`).join(", ")}${found.length > MOST_NAMED ? ` and ${number(found.length - MOST_NAMED)} more` : ""}`;
  const parts = [
    stale.length ? list("no recent step", stale, (each) => `${duration(each.step_age_s)} ago`) : null,
    slow.length ? list("behind", slow, (each) => `${number(each.behind)} steps`) : null,
  ];
  return parts.filter(Boolean).join("; ") || "Select a rank for its figures and its log.";
}

/** The map, with `update(job)` and the property `selected`. */
export function rankMap(onSelect) {
  const grid = h("div", { class: "ranks", role: "group", "aria-label": "ranks" });
  const others = h("div", { class: "dim", hidden: true });
  const about = h("p", { class: "dim", "aria-live": "off" });
  const legend = h("div", { class: "legend" }, KEYS.map(([name, text]) => h("span", {}, h("span", { class: `key ${name}` }), text)));
  const section = h("section", { id: "ranks" }, h("h2", {}, "Ranks"), grid, others, about, legend);
  let [cells, job] = [[], null];
  const map = { section, selected: null, update };

  function focusOn(index) {
    const cell = cells[Math.max(0, Math.min(index, cells.length - 1))];
    for (const each of cells) each.tabIndex = each === cell ? 0 : -1;
    cell?.focus();
  }

  section.addEventListener("keydown", (event) => {
    if (event.key === "Escape") select(null);
  });

  grid.addEventListener("keydown", (event) => {
    const index = cells.indexOf(document.activeElement);
    if (index < 0) return;
    const across = Math.max(1, cells.findIndex((cell) => cell.offsetTop > cells[0].offsetTop));
    const row = cells.at(-1).offsetTop > cells[0].offsetTop ? across : cells.length;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -cells.length, End: cells.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const next = index + moves[event.key];
    if (!event.key.startsWith("Arrow") || (next >= 0 && next < cells.length)) focusOn(next);
  });

  function select(rank) {
    map.selected = rank;
    show();
    if (rank !== null) onSelect(rank);
  }

  function show() {
    const rank = job?.ranks.find((each) => each.rank === map.selected);
    about.textContent = rank ? describe(rank, job.nodes) : attention(job?.ranks ?? []);
    for (const cell of cells) cell.setAttribute("aria-pressed", String(Number(cell.dataset.rank) === map.selected));
  }

  function update(next) {
    job = next;
    const numbers = job.ranks.map((rank) => rank.rank);
    grid.classList.toggle("few", numbers.length <= 64);
    fill(grid, numbers, () => {
      cells = numbers.map((rank, index) =>
        h("button", { type: "button", class: "rank", tabindex: index ? -1 : 0, "data-rank": rank, onclick: () => select(rank === map.selected ? null : rank) }, String(rank)));
      return cells;
    });
    job.ranks.forEach((rank, index) => {
      const [cell, name, text] = [cells[index], `rank ${shade(rank)}`, describe(rank, job.nodes)];
      if (cell.className !== name) cell.className = name;
      if (cell.title !== text) {
        cell.title = text;
        cell.setAttribute("aria-label", text);
      }
    });
    const left = (job.world_size ?? 0) - job.ranks.length;
    others.hidden = left <= 0;
    const why = job.fault === null ? ": start regrow web with their log directories or --rdzv-endpoint." : ", because their agents have sent no answer.";
    others.textContent = `Without ${number(left)} rank${left === 1 ? "" : "s"} of other hosts${why}`;
    show();
  }
  return map;
}
