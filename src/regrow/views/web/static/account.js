// The ledger of a job as a chart, and the explanation of each failure.

import { get } from "./api.js";
import { duration, fill, h, number, s } from "./dom.js";

const AGAIN_MS = 1000;
const percent = (share) => (share === null ? "-" : `${(100 * share).toFixed(1)} %`);

/** The sections, with `update(job)`, which reads the account again when the job has further events. */
export function accountPanel(key) {
  const failed = h("div");
  const chart = h("div");
  const failures = h("section", { id: "failures" }, h("h2", {}, "Failures and restarts"), failed);
  const ledger = h("section", { id: "ledger" }, h("h2", {}, "What the time was spent on"), chart);
  let [wanted, known, isReading, isClosed, seen] = [null, null, false, false, 0];

  async function read() {
    isReading = true;
    while (!isClosed && known !== wanted) {
      const version = wanted;
      try {
        const found = await get(`jobs/${key}/account`);
        if (found.is_current) known = version;
        show(found);
      } catch {
        // the page shows the lost connection
      }
      if (known !== version) await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
    isReading = false;
  }

  function show(found) {
    fill(chart, found.ledger, ledgerChart);
    const open = new Set([...failed.querySelectorAll("details[open]")].map((each) => Number(each.dataset.number)));
    const last = found.explanations.at(-1)?.number ?? 0;
    const isOpen = (each) => (each.number > seen ? each.number === last : open.has(each.number));
    fill(failed, found.explanations, (all) => explained(all, found, isOpen));
    seen = last;
  }

  return {
    failures, ledger,
    update: (job) => { wanted = job.events; if (!isReading) read(); },
    close: () => { isClosed = true; },
  };
}

function ledgerChart(ledger) {
  if (!ledger) return h("p", { class: "dim" }, "Not known: it needs the log directories of all hosts.");
  const whole = ledger.total_s || 1;
  let at = 0;
  const parts = ledger.buckets.map((each) => {
    const [from, size] = [at, (100 * each.seconds) / whole];
    at += size;
    return s("rect", { class: `bucket ${shade(each)}`, x: `${from}%`, y: 0, width: `${size}%`, height: "100%" }, s("title", {}, `${each.title}: ${percent(each.seconds / whole)}`));
  });
  const facts = [
    ["goodput", ledger.goodput, `productive ${duration(ledger.productive_s)} / all ${duration(ledger.total_s)}`],
    ["effective training time", ledger.effective_training_time_ratio, `productive and phases ${duration(ledger.productive_s + ledger.phases_s)} / all ${duration(ledger.total_s)}`],
  ];
  return [
    h("dl", { class: "facts wide" }, facts.map(([name, share, formula]) => h("div", {}, h("dt", {}, `${name} = ${formula}`), h("dd", {}, percent(share))))),
    s("svg", { class: "ledger", role: "img", "aria-label": "shares of the worker-time, as in the table below" }, HATCH(), parts),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "worker-time"), h("th", { class: "num" }, "time"), h("th", { class: "num" }, "share"), h("th", {}, ""))),
      h("tbody", {}, ledger.buckets.map((each) => h("tr", {},
        h("td", {}, h("span", { class: `key ${shade(each)}` }), each.title), h("td", { class: "num" }, duration(each.seconds)),
        h("td", { class: "num" }, percent(each.seconds / whole)), h("td", { class: "long dim" }, each.meaning)))))),
  ];
}

const HATCH = () => s("defs", {}, s("pattern", { id: "hatch", patternUnits: "userSpaceOnUse", width: 6, height: 6, patternTransform: "rotate(45)" }, s("path", { class: "hatch", d: "M0 0h3v6h-3z" })));

// Productive time is green, unknown time is hatched, each loss has a colour of its own. Phases are
// blue, in shades that a script with many phases uses again.
const PHASES = 4;
function shade({ name, place }) {
  if (name === "productive" || name === "unknown") return name;
  return name.startsWith("phase:") ? `phase${place % PHASES}` : `loss${place}`;
}

function explained(all, { left_out: leftOut, rungs }, isOpen) {
  if (!all.length) return h("p", { class: "dim" }, "None.");
  const more = leftOut ? [h("p", { class: "dim" }, `${number(leftOut)} earlier ones: regrow explain`)] : [];
  return [...more, ...all.map((each) => explanation(each, rungs, isOpen(each)))];
}

function explanation(each, rungs, isOpen) {
  const healed = each.rung === null ? "" : ` (rung ${each.rung}, ${rungs[each.rung]}${each.cost.seconds === null ? "" : `, ${duration(each.cost.seconds)}`})`;
  const about = [
    each.attempt === null ? null : `attempt ${each.attempt}`, `cause: ${each.cause}`,
    each.injected ? `injected by --chaos: ${each.injected}` : null, each.outcome,
  ].filter(Boolean);
  return h("details", { open: isOpen, "data-number": each.number },
    h("summary", {}, h("span", { class: "dim" }, `${each.number}. ${each.time_text} `), each.title, h("span", { class: "dim" }, healed)),
    h("p", { class: "dim" }, about.join(" · ")),
    h("h3", {}, "Evidence"),
    each.evidence.map((fact) => [
      h("p", {}, h("strong", {}, fact.label), ` ${fact.text}`),
      fact.lines.length ? h("pre", { tabindex: 0 }, fact.lines.join("\n")) : null]).flat(),
    each.peers.map((text) => h("p", {}, text)),
    h("h3", {}, "What regrow did"),
    each.action.map((text) => h("p", {}, text)),
    each.refusals.map(({ rung, reason }) => h("p", {}, h("span", { class: "dim" }, `not rung ${rung}, ${rungs[rung]}: `), reason)),
    each.svg ? [h("h3", {}, "Timeline"), drawing(each)] : null,
    h("h3", {}, "Cost"),
    h("p", {}, costOf(each.cost)),
    each.cost.buckets.length ? bucketTable(each.cost.buckets) : null,
    each.long.length ? h("h3", {}, "What made it long") : null,
    each.long.map((held) => h("p", {}, h("strong", {}, `${duration(held.seconds)} ${held.setting}`), ` (${held.value}): ${held.text}`)));
}

function drawing(each) {
  const text = each.timeline.map(([name, length, meaning]) => `${name} ${duration(length)}, ${meaning}`).join("; ");
  const url = URL.createObjectURL(new Blob([each.svg], { type: "image/svg+xml" }));
  return h("img", { class: "timeline", src: url, alt: `Timeline: ${text}`, onload: () => URL.revokeObjectURL(url) });
}

function bucketTable(buckets) {
  const row = ([name, seconds, meaning]) => h("tr", {}, h("td", {}, name), h("td", { class: "num" }, duration(seconds)), h("td", { class: "long dim" }, meaning));
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, buckets.map(row))));
}

function costOf(cost) {
  const parts = [`time: ${cost.seconds === null ? "unknown" : duration(cost.seconds)}`];
  if (cost.steps !== null) parts.push(`${number(cost.steps)} steps done again${cost.redone_s ? ` (${duration(cost.redone_s)})` : ""}`);
  if (cost.worker_seconds !== null) parts.push(`worker-time: ${cost.worker_time}`);
  if (cost.restarts !== null) parts.push(`restarts spent: ${cost.restarts}${cost.restarts_left === null ? "" : `, left: ${cost.restarts_left}`}`);
  return parts.join("; ");
}
