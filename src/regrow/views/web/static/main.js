// The page: the list of jobs, or one job, by the fragment of the address.

import { Refused, follow, setToken, takeToken } from "./api.js";
import { fill, h, stateOf } from "./dom.js";
import { jobPage } from "./job.js";

const main = document.getElementById("main");
const crumb = document.getElementById("crumb");
const link = document.getElementById("link");
let stop = () => {};

function onLink(state, error) {
  link.className = state;
  link.textContent = state === "live" ? "live" : `no connection: ${error.message}`;
  if (!(error instanceof Refused)) return;
  stop();
  if (error.status === 401) askForToken();
  else main.replaceChildren(h("section", {}, h("p", {}, `${error.message}. `), h("a", { href: "#/" }, "All jobs")));
}

function askForToken() {
  const input = h("input", { id: "token", autocomplete: "off", spellcheck: "false" });
  main.replaceChildren(h("section", {},
    h("h1", {}, "Token"),
    h("p", {}, h("label", { for: "token" }, "The command regrow web has printed the address of this page with a token. Open that address, or enter the token: ")),
    h("form", { onsubmit: (event) => { event.preventDefault(); setToken(input.value); route(); } }, input, " ", h("button", { class: "plain" }, "Open"))));
  input.focus();
}

function jobList() {
  const table = h("div", { class: "scroll" });
  main.replaceChildren(h("section", { id: "jobs" }, h("h2", {}, "Jobs"), table));
  return follow("jobs/live", (jobs) => fill(table, jobs, rows), onLink);
}

function rows(jobs) {
  if (!jobs.length) return h("p", {}, "No job yet in these directories. Start one with regrow run --log-dir.");
  return h("table", {},
    h("thead", {}, h("tr", {}, ["job", "state", "started", "last event", "hosts", "command"].map((name) => h("th", {}, name)))),
    h("tbody", {}, jobs.map((job) => h("tr", {},
      h("td", {}, h("a", { href: `#/job/${job.key}` }, job.run_id)), h("td", {}, stateOf(job.state)), h("td", {}, job.started),
      h("td", {}, job.last), h("td", {}, job.hosts.length > 3 ? `${job.hosts.length} hosts` : job.hosts.join(", ")), h("td", { class: "long" }, job.script)))));
}

function route() {
  takeToken();
  stop();
  link.textContent = "";
  const key = /^#\/job\/([0-9a-f]+)$/.exec(location.hash)?.[1];
  const name = (text) => {
    if (crumb.textContent !== text) [crumb.textContent, document.title] = [text, text ? `${text} - regrow` : "regrow"];
  };
  name("");
  stop = key ? jobPage(main, key, onLink, name) : jobList();
  main.focus({ preventScroll: true });
}

addEventListener("hashchange", route);
route();
