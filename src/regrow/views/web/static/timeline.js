// The attempts of all nodes over time, with restarts and failures, as a drawing.

import { duration, h, s } from "./dom.js";

const [LANE, LABEL, TOP] = [22, 130, 6];
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

export function timeline() {
  const drawing = s("svg", { class: "timeline", role: "img", "aria-label": "attempts of each node over time" });
  const section = h("section", { id: "timeline" }, h("h2", {}, "Attempts and restarts"), drawing);
  let job = null;
  new ResizeObserver(draw).observe(section);

  function draw() {
    if (!job || !drawing.clientWidth) return;
    const begin = job.started ?? job.attempts[0]?.started ?? 0;
    const end = Math.max(begin + (job.duration_s ?? 0), ...job.attempts.map((each) => each.ended ?? each.started), begin + 1);
    const width = drawing.clientWidth - LABEL;
    const x = (at) => LABEL + ((Math.min(Math.max(at, begin), end) - begin) / (end - begin)) * width;
    const lanes = job.nodes.slice(0, 64);
    const height = TOP + lanes.length * LANE;
    drawing.setAttribute("height", height + 20);
    const parts = [];
    const tick = STEPS.find((each) => ((end - begin) / each) * 70 <= width) ?? 86400 * 7;
    for (let at = 0; begin + at <= end; at += tick) {
      parts.push(s("line", { class: "tick", x1: x(begin + at), x2: x(begin + at), y1: 0, y2: height }));
      parts.push(s("text", { x: x(begin + at), y: height + 15, "text-anchor": at ? "middle" : "start" }, at ? duration(at).replace(".0 s", " s") : "0"));
    }
    lanes.forEach((node, index) => {
      const y = TOP + index * LANE;
      const from = node.started ?? begin;
      const until = job.is_over || node.alive === false ? node.last ?? end : end;
      parts.push(s("text", { x: 0, y: y + 13 }, short(node.host), s("title", {}, node.name)));
      parts.push(bar("wait", x(from), x(until), y + 6, 4, `${node.host}: ${node.state}`));
      for (const attempt of job.attempts.filter((each) => each.node === index)) {
        const stop = attempt.ended ?? until;
        const kind = attempt.ended === null ? "open" : attempt.state === "failed" ? "end-bad" : attempt.state === "succeeded" ? "run" : "end-calm";
        const text = `attempt ${attempt.number}, from ${duration(attempt.started - begin)}, for ${duration(stop - attempt.started)}, ${attempt.state}${attempt.reason ? `: ${attempt.reason}` : ""}`;
        parts.push(bar("run", x(attempt.started), x(stop), y, 16, text));
        if (attempt.ended !== null) parts.push(bar(kind, x(stop) - 3, x(stop), y, 16, text));
      }
    });
    for (const each of job.restarts.filter((restart) => restart.time)) {
      const text = `after ${duration(each.time - begin)}, rung ${each.rung}: ${each.rank === null ? "" : `rank ${each.rank}: `}${each.what}`;
      const soft = each.rung < 3 || each.cause === "membership" ? "soft" : "";
      parts.push(s("line", { class: `mark ${soft}`, x1: x(each.time), x2: x(each.time), y1: 0, y2: height }, s("title", {}, text)));
    }
    drawing.replaceChildren(...parts);
  }

  function bar(kind, from, to, y, height, text) {
    return s("rect", { class: kind, x: from, y, width: Math.max(to - from, 1.5), height, rx: 2 }, s("title", {}, text));
  }

  return { section, update: (next) => { job = next; draw(); } };
}

function short(host) {
  return host.length > 18 ? `${host.slice(0, 17)}…` : host;
}
