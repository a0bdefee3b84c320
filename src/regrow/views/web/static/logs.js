// The log of one rank, followed live.

import { follow, get } from "./api.js";
import { h } from "./dom.js";

const MOST_LINES = 5000;
const NOTHING = "No output is kept: start the job with --redirects 3 or --tee 3, and with --log-dir.";

/** The panel; `choose(rank)` shows a rank, `update(job)` notices further attempts. */
export function logPanel(key) {
  const files = h("select", { "aria-label": "log file", hidden: true, onchange: () => open(files.value, false) });
  const stick = h("input", { type: "checkbox", checked: true, id: "stick" });
  const note = h("p", { class: "dim", hidden: true });
  const output = h("pre", { class: "log", hidden: true, tabindex: 0, role: "log", "aria-label": "output of the rank", "aria-live": "off" });
  const section = h("section", { id: "logs" },
    h("div", { class: "row" }, h("h2", {}, "Logs"), files, h("label", { for: "stick" }, stick, " follow the end")), note, output);
  let [job, known, stop, shown, lines, open_line] = [null, null, null, null, [], ""];
  let [attempt, wanted] = [null, null];

  function nameOf(file) {
    const node = job.nodes[file.run];
    const ranks = job.attempts.find((each) => each.node === file.run && each.number === file.attempt)?.ranks;
    return { rank: ranks?.[file.local_rank] ?? null, text: `${node?.host ?? "?"} · attempt ${file.attempt} · ${ranks ? `rank ${ranks[file.local_rank]}` : `local rank ${file.local_rank}`} · ${file.stream}` };
  }

  async function list() {
    try {
      known = await get(`jobs/${key}/logs`);
    } catch {
      return; // the page shows the lost connection
    }
    files.hidden = known.length === 0;
    files.replaceChildren(...known.map((file) => h("option", { value: address(file) }, nameOf(file).text)));
    if (shown) files.value = shown;
    if (!shown || wanted !== null) choose(wanted ?? first());
  }

  /** Return the lowest rank with output in the latest attempt. */
  function first() {
    const latest = Math.max(...known.map((file) => file.attempt));
    return Math.min(...known.filter((file) => file.attempt === latest).map((file) => nameOf(file).rank ?? 0));
  }

  const address = (file) => `${file.run}/${file.attempt}/${file.local_rank}/${file.stream}`;

  /** Show the newest output of a rank: the stream that is shown now, else stdout. */
  function choose(rank) {
    const own = known.filter((file) => nameOf(file).rank === rank);
    const latest = Math.max(...own.map((file) => file.attempt));
    const newest = own.filter((file) => file.attempt === latest);
    const stream = shown?.split("/")[3];
    const best = newest.find((file) => file.stream === stream) ?? newest.find((file) => file.stream === "stdout") ?? newest[0];
    if (best) open(address(best), true);
    else if (known.length) start(null, `No output of rank ${rank} here: the log directory of its host is not read, or its output is not kept.`);
    else start(null, NOTHING);
  }

  function open(file, isLatest) {
    const name = nameOf(known.find((each) => address(each) === file));
    const newest = known.filter((each) => nameOf(each).rank === name.rank).every((each) => each.attempt <= Number(file.split("/")[1]));
    wanted = isLatest || newest ? name.rank : null; // goes on with the next attempt
    if (file !== shown) start(file, "");
  }

  /** Follow a file from now on; null: none, for the reason in `why`. */
  function start(file, why) {
    stop?.();
    [shown, lines, open_line] = [file, [], ""];
    files.value = file ?? "";
    output.textContent = "";
    note.textContent = why;
    note.hidden = file !== null;
    output.hidden = file === null;
    stop = file === null ? null : follow(`jobs/${key}/logs/${file}/live`, add, () => {});
  }

  function add(text) {
    const parts = (open_line + clean(text)).split("\n");
    open_line = parts.pop();
    lines.push(...parts);
    if (lines.length > MOST_LINES) lines = lines.slice(-MOST_LINES);
    output.textContent = [...lines, open_line].map((line) => line.slice(line.lastIndexOf("\r", line.length - 2) + 1)).join("\n");
    if (stick.checked) output.scrollTop = output.scrollHeight;
  }

  // The codes of a terminal, such as those of colours.
  const clean = (text) => text.replaceAll(/\u001b\[[0-9;?]*[A-Za-z]/g, "");

  function update(next) {
    job = next;
    const running = job.attempts.map((each) => `${each.node}:${each.number}`).join();
    if (running === attempt) return;
    attempt = running;
    list();
  }

  return { section, update, choose: (rank) => { wanted = rank; if (known) choose(rank); }, close: () => stop?.() };
}
