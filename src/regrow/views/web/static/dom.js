// Elements, and the texts of numbers and times.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Create an element; texts are never read as HTML. */
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Create an element of an SVG drawing. */
export function s(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace the content of an element, if `content` differs from what it was made from before. */
export function fill(element, content, make) {
  const text = JSON.stringify(content);
  if (element.madeFrom === text) return;
  element.madeFrom = text;
  element.replaceChildren(...[make(content)].flat().filter((child) => child !== null));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 1) return `${(seconds * 1000).toPrecision(2) * 1} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = `${String(minutes).padStart(hours ? 2 : 1, "0")}:${String(whole % 60).padStart(2, "0")}`;
  return hours ? `${hours}:${rest} h` : `${rest} min`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

/** The step of a job or a rank. */
export function stepOf(each) {
  return `${each.step_is_minimum ? "at least " : ""}${number(each.step)}`;
}

const LEVELS = {
  good: ["running", "succeeded"],
  warn: ["waiting", "starting", "restarting", "stopping", "replacing", "suspended", "stalled", "unknown"],
  bad: ["failed", "killed", "error", "hung", "lost"],
};

export function level(state) {
  return Object.keys(LEVELS).find((name) => LEVELS[name].includes(state)) ?? "calm";
}

export function stateOf(state) {
  return h("span", { class: `state ${level(state)}` }, state);
}
