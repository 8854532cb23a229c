"use strict";

// The samples: search, filters, pages. Every text is set as text, never as markup.

const PAGE_SIZE = 20;
const KINDS = ["text", "special", "sign", "role"];
const samples = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");
let found = samples;
let first = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// What the search looks at, made when it is first needed.
function searched(sample) {
  if (sample.searched === undefined) {
    const runs = sample.texts.flatMap(([, parts]) => parts).filter(([, code]) => code >> 1 !== 3);
    const text = runs.map(([part]) => part).join("");
    const facts = sample.facts.map(([name, value]) => `${name} ${value}`);
    const values = [sample.position, sample.place, sample.source, sample.reason, ...facts];
    sample.searched = `${text}\n${values.join("\n")}`.toLowerCase();
  }
  return sample.searched;
}

function bound(id, otherwise) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? otherwise : value;
}

const ORDERS = {
  tokens: (a, b) => a.tokens - b.tokens,
  "-tokens": (a, b) => b.tokens - a.tokens,
  trained: (a, b) => share(a) - share(b),
};

function share(sample) {
  return sample.trained === null || !sample.tokens ? 2 : sample.trained / sample.tokens;
}

function find() {
  const [text, source, state] = ["text", "source", "state"].map((id) => byId(id).value);
  const [least, most] = [bound("least", 0), bound("most", Infinity)];
  const words = text.trim().toLowerCase();
  found = samples.filter(
    (sample) =>
      (!source || sample.source === source) &&
      (!state || sample.states.includes(state)) &&
      sample.tokens >= least &&
      sample.tokens <= most &&
      (!words || searched(sample).includes(words)),
  );
  const order = ORDERS[byId("order").value];
  if (order) found.sort(order);
  first = 0;
  show();
}

function show() {
  const words = byId("text").value.trim().toLowerCase();
  const shown = found.slice(first, first + PAGE_SIZE);
  byId("sample-list").replaceChildren(...shown.map((sample) => article(sample, words)));
  const of = samples.length === found.length ? "" : ` of ${count(samples.length)}`;
  byId("found").textContent = samples.length
    ? `${count(found.length)}${of} samples${found.length ? "" : ": no sample has all of this"}`
    : "There are no samples.";
  byId("page").textContent = found.length
    ? `${count(first + 1)} to ${count(first + shown.length)}`
    : "";
  byId("before").disabled = first === 0;
  byId("after").disabled = first + PAGE_SIZE >= found.length;
}

function article(sample, words) {
  const made = element("article", `sample ${sample.state}`);
  const head = element("header");
  head.append(element("h3", "", sample.position), element("span", "place", sample.place));
  if (sample.source) head.append(element("span", "badge", sample.source));
  if (sample.state !== "kept") head.append(element("span", "badge state", sample.state));
  const trained = sample.trained === null ? "no labels" : `${count(sample.trained)} trained`;
  if (sample.tokens) head.append(element("span", "tokens", `${count(sample.tokens)} tokens, ${trained}`));
  made.append(head);
  if (sample.reason) made.append(element("p", "reason", sample.reason));
  for (const [name, runs] of sample.texts) {
    if (name) made.append(element("h4", "", name));
    made.append(textOf(runs, words));
  }
  if (sample.ids) made.append(idsOf(sample.ids));
  if (sample.pictures) {
    const pictures = element("div", "pictures");
    for (const [caption, address] of sample.pictures) {
      const figure = element("figure");
      if (address) {
        const image = element("img");
        image.src = address;
        image.alt = caption;
        figure.append(image);
      }
      figure.append(element("figcaption", "", caption));
      pictures.append(figure);
    }
    made.append(pictures);
  }
  if (sample.facts.length) {
    const facts = element("dl", "facts");
    for (const [name, value] of sample.facts) {
      const pair = element("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      facts.append(pair);
    }
    made.append(facts);
  }
  return made;
}

// The tokens' ids are many elements' worth of text: they are written when they are asked for.
function idsOf(ids) {
  const box = element("details", "ids");
  box.append(element("summary", "", `${count(ids.length)} token ids`));
  box.addEventListener("toggle", () => box.append(element("code", "", ids.join(" "))), { once: true });
  return box;
}

function textOf(runs, words) {
  const box = element("div", "passage");
  for (const [text, code] of runs) {
    const kind = KINDS[code >> 1];
    const run = element("span", `run ${kind}${code & 1 ? " trained" : ""}`);
    marked(run, text, kind === "role" ? "" : words);
    box.append(run);
  }
  const isLong = runs.reduce((sum, [text]) => sum + text.length, 0) > 1200;
  if (!isLong) return box;
  const all = element("button", "more", "Show all of it");
  all.type = "button";
  all.setAttribute("aria-expanded", "false");
  const isFound = words && box.querySelector("mark");
  box.classList.toggle("short", !isFound);
  all.addEventListener("click", () => {
    const isShort = box.classList.toggle("short");
    all.textContent = isShort ? "Show all of it" : "Show less";
    all.setAttribute("aria-expanded", String(!isShort));
  });
  const both = element("div");
  both.append(box, ...(isFound ? [] : [all]));
  return both;
}

// Append the text, with what was searched for marked. Positions are those of the lower-case text where these agree.
function marked(parent, text, words) {
  const lower = text.toLowerCase();
  let from = 0;
  if (words && lower.length === text.length) {
    for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
      parent.append(text.slice(from, at), element("mark", "", text.slice(at, at + words.length)));
      from = at + words.length;
    }
  }
  parent.append(text.slice(from));
}

function unfold() {
  if (byId("folded")) byId("folded").open = true;
}

function turn(by) {
  first += by;
  show();
  byId("filters").scrollIntoView();
}

function fillChoices(id, values) {
  const sorted = [...new Set(values)].filter(Boolean).sort();
  byId(id).append(...sorted.map((value) => new Option(value, value)));
  byId(id).closest("label").hidden = sorted.length < 2;
}

if (byId("filters")) {
  fillChoices("source", samples.map((sample) => sample.source));
  fillChoices("state", samples.flatMap((sample) => sample.states));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("input", find);
  byId("filters").addEventListener("reset", () => queueMicrotask(find));
  byId("before").addEventListener("click", () => turn(-PAGE_SIZE));
  byId("after").addEventListener("click", () => turn(PAGE_SIZE));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    unfold();
    byId("text").focus();
  });
  find();
}

// The charts: the pointer and the arrow keys read the row of the data table that belongs to a point.

const tip = byId("tip");

function readPoint(plot, number) {
  const table = byId(plot.dataset.of);
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const cells = [...table.tBodies[0].rows[number].cells].map((cell) => cell.textContent);
  tip.replaceChildren(...cells.map((cell, at) => element("div", at ? "" : "first", `${names[at]}: ${cell}`)));
  const at = Number(plot.dataset.at.split(" ")[number]);
  const cursor = plot.querySelector(".cursor");
  cursor.style.left = `${at}%`;
  cursor.hidden = tip.hidden = false;
  const area = plot.getBoundingClientRect();
  const left = area.left + (area.width * at) / 100;
  const width = tip.offsetWidth;
  tip.style.left = `${Math.max(4, Math.min(left + 12, document.documentElement.clientWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, area.top - tip.offsetHeight - 4)}px`;
  plot.dataset.number = number;
}

function leave(plot) {
  plot.querySelector(".cursor").hidden = tip.hidden = true;
}

for (const plot of document.querySelectorAll(".plot")) {
  const places = plot.dataset.at.split(" ").map(Number);
  const last = places.length - 1;
  plot.addEventListener("pointermove", (event) => {
    const area = plot.getBoundingClientRect();
    const at = (100 * (event.clientX - area.left)) / area.width;
    const distances = places.map((place) => Math.abs(place - at));
    readPoint(plot, distances.indexOf(Math.min(...distances)));
  });
  plot.addEventListener("pointerleave", () => leave(plot));
  plot.addEventListener("blur", () => leave(plot));
  plot.addEventListener("keydown", (event) => {
    const now = Number(plot.dataset.number ?? -1);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave(plot);
    if (next === undefined) return;
    event.preventDefault();
    readPoint(plot, Math.max(0, Math.min(next, last)));
  });
}

// The tables: a click on a heading sorts by its column, and one more turns the order round.

function sortKey(cell) {
  const text = cell.textContent.trim();
  const number = Number.parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1;
}

for (const table of document.querySelectorAll("main table:not([id$=-data])")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = element("button", "sort", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[column]), row]);
      rows.sort(([a], [b]) => sign * compare(a, b));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

// The colours, which the browser keeps where it may; and the section that is seen, in the navigation.

const theme = byId("theme");

function setTheme(value) {
  theme.value = value;
  document.documentElement.dataset.theme = value;
}

try {
  setTheme(localStorage.getItem("asyncdata-theme") ?? "");
} catch {
  setTheme("");
}
theme.addEventListener("change", () => {
  setTheme(theme.value);
  try {
    localStorage.setItem("asyncdata-theme", theme.value);
  } catch {
    // A page that is opened from a file may keep nothing in some browsers.
  }
});

// A page that is served renews itself, unless samples are being read.

const renewedS = Number(document.documentElement.dataset.renewed ?? 0);
if (renewedS) {
  setInterval(() => {
    if (!byId("folded")?.open && !document.hidden) location.reload();
  }, 1000 * renewedS);
}

const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      const link = links.get(entry.target.id);
      link.setAttribute("aria-current", "true");
      link.closest("ul").scrollLeft = link.offsetLeft - 40; // on a phone the list is wider than the screen
    }
  },
  { rootMargin: "-10% 0px -80% 0px" },
);
for (const section of document.querySelectorAll("main > section")) seen.observe(section);
