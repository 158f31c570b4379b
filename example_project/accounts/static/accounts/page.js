"use strict";

// Everything is put in as text: nothing that a handler or a user said becomes markup.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function badge(status) {
  return element("span", `badge ${status}`, status);
}

function link(url, text) {
  const made = element(url ? "a" : "span", "", text);
  if (url) made.href = url;
  return made;
}

function eventItem(row) {
  const item = element("li");
  item.dataset.status = row.status;
  item.dataset.type = row.what;
  item.append(badge(row.status), link(row.url, row.what), ` ${row.whom} `);
  if (row.attempts > 1) item.append(element("span", "soft", `attempt ${row.attempts} `));
  if (row.due) item.append(element("span", "soft", `again at ${row.due} UTC`));
  const handlers = element("p", "handlers");
  for (const each of row.handlers) {
    const state = each.delivered ? "delivered" : each.error ? "broken" : "owed";
    const mark = { delivered: "✓", broken: "✗", owed: "…" }[state];
    const shown = element("span", state, `${mark} ${each.name}`);
    shown.title = each.delivered ? `delivered at ${each.delivered} UTC` : each.error || "owed";
    handlers.append(shown);
  }
  item.append(handlers);
  if (row.error && row.status !== "done") item.append(element("p", "error", row.error));
  return item;
}

function plainItem(row) {
  const item = element("li");
  if (row.status) {
    item.dataset.status = row.status;
    item.append(badge(row.status));
  }
  item.append(link(row.url, row.what));
  for (const text of [row.whom, row.note]) if (text) item.append(element("span", "soft", ` ${text}`));
  return item;
}

function userItem(row) {
  const item = element("li", "", `${row.name} `);
  item.append(element("span", "soft", row.tokens ? `logged in on ${row.tokens} devices` : "logged out everywhere"));
  return item;
}

const ITEMS = { events: eventItem, announced: eventItem, users: userItem };
const LISTS = ["events", "mails", "webhooks", "tasks", "notifications", "audit", "users", "announced"];
const shown = {};

function show(state) {
  for (const name of LISTS) {
    const text = JSON.stringify(state[name]);
    if (shown[name] === text) continue;
    shown[name] = text;
    const items = state[name].map(ITEMS[name] || plainItem);
    document.getElementById(name).replaceChildren(...(items.length ? items : [element("li", "empty", "Nothing yet.")]));
  }
  for (const box of document.querySelectorAll("#actions input[type=checkbox]")) {
    if (!box.disabled) box.checked = state.switches[box.value];
  }
}

let asking = false;

async function look() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const response = await fetch("/state/");
    if (response.ok) show(await response.json());
  } catch {
    say("The server does not answer.");
  } finally {
    asking = false;
  }
}

function say(text) {
  document.getElementById("said").textContent = text;
}

async function act(what, fields) {
  const body = new URLSearchParams(fields);
  body.set("csrfmiddlewaretoken", document.querySelector("[name=csrfmiddlewaretoken]").value);
  try {
    const response = await fetch(`/act/${what}/`, { method: "POST", body });
    say((await response.json()).said);
  } catch {
    say("That did not work.");
  }
  look();
}

const form = document.getElementById("actions");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.submitter) act(event.submitter.value, {});
});
form.addEventListener("change", async (event) => {
  const box = event.target;
  // The state that is fetched meanwhile must not flip it back.
  box.disabled = true;
  await act(box.value, { failing: box.checked ? "yes" : "no" });
  box.disabled = false;
});

look();
setInterval(look, 400);
