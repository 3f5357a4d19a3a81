// SPDX-License-Identifier: Apache-2.0
// Keeps the live page of a job up to date. All HTML comes from this page's own server, which escapes foreign text.
"use strict";

const PAUSE = 500; // milliseconds between two requests; longer if the page is hidden or the server does not answer
const LONGEST_PAUSE = 5000;
const MOST_AGE = 3; // seconds; numbers and pictures that are older say their age
const element = (id) => document.getElementById(id);
let shown = 0; // version of the pictures on the page
let failures = 0; // requests in a row that failed
let answered = performance.now(); // when the last answer came
let dated = {}; // when (performance.now()) the numbers ("now"), the "ring" and the "pictures" on the page were true

// Replace the content of an element. Tables stay unfolded, pictures stay scrolled, and the focus stays where it is.
function replace(target, html) {
  const key = (node) => { // the section and the place in it: texts contain numbers, which change
    const part = node.closest("#now, section");
    const alike = [...part.querySelectorAll(node.tagName === "SUMMARY" ? "summary" : ".scroll")];
    return `${part.id || part.getAttribute("aria-labelledby")} ${node.tagName} ${alike.indexOf(node)}`;
  };
  const open = new Set([...target.querySelectorAll("details[open] > summary")].map(key));
  const scrolled = new Map([...target.querySelectorAll(".scroll")].map((node) => [key(node), node.scrollLeft]));
  const active = target.contains(document.activeElement) ? key(document.activeElement) : null;
  target.innerHTML = html;
  for (const summary of target.querySelectorAll("summary")) summary.parentElement.open = open.has(key(summary));
  for (const node of target.querySelectorAll(".scroll")) node.scrollLeft = scrolled.get(key(node)) || 0;
  if (active !== null)
    [...target.querySelectorAll("summary, .scroll")].find((node) => key(node) === active)?.focus({ preventScroll: true });
}

function say(text) {
  if (element("state").textContent !== text) element("state").textContent = text;
}

async function answer(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply;
}

// Say the age of old numbers and pictures. It grows also while no answer comes.
function tellAges() {
  if (performance.now() - answered >= 1000 * MOST_AGE && !failures)
    say("Waiting for an answer: the page shows the last known state.");
  for (const [id, heads] of [["now", "#now > :first-child"], ["ring", "#ring h2"], ["pictures", "#pictures h2"]]) {
    const age = id in dated ? Math.floor((performance.now() - dated[id]) / 1000) : 0;
    const two = (number) => String(number).padStart(2, "0");
    const text = age < 60 ? `${age} s old` : `${Math.floor(age / 60)}:${two(age % 60)} min old`;
    for (const head of document.querySelectorAll(heads))
      if (age >= MOST_AGE) head.dataset.age = text;
      else delete head.dataset.age;
  }
}

async function update() {
  try {
    const told = await (await answer("now")).json();
    const came = answered = performance.now();
    document.title = told.title;
    replace(element("now"), told.now);
    if (told.version !== shown) {
      replace(element("pictures"), await (await answer("pictures")).text());
      shown = told.version;
    }
    failures = 0;
    dated = Object.fromEntries(Object.entries(told.ages).map(([id, age]) => [id, came - 1000 * age]));
    say(told.state);
    tellAges();
    if (told.final) return clearInterval(ageing);
  } catch {
    failures += 1;
    say("No answer from edl: the page shows the last known state.");
  }
  setTimeout(update, document.hidden ? LONGEST_PAUSE : Math.min(PAUSE * 2 ** failures, LONGEST_PAUSE));
}

const ageing = setInterval(tellAges, 500);
update();
